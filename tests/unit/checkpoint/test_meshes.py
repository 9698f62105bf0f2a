"""Any mesh loads what any other has stored: simulated ranks, real files; what no rank holds or two mean is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepspeed.checkpoint.format.manifest import LEFT_OUT, Manifest, ManifestEntry, rank_file
from deepspeed.checkpoint.format.safetensors_file import TensorFile, write_tensors
from deepspeed.checkpoint.load.reader import NativeSource, ReadRequest
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.checkpoint.save.save_plan import LocalShards, entry_of, take
from deepspeed.errors import CheckpointError
from deepspeed.zero.layout.placement import Cut
from deepspeed.zero.layout.regions import Region, RegionRange
from tests.unit.checkpoint.simulated_mesh import FIELDS, MODEL, Mesh, load, save, values_of


def pairs(count: int, seed: int) -> list[tuple[Mesh, Mesh]]:
    draw = random.Random(seed)

    def mesh() -> Mesh:
        return Mesh(draw.randint(1, 2), draw.randint(1, 2), draw.randint(1, 3), draw.randint(1, 4), draw.randint(0, 99))

    return [(mesh(), mesh()) for _ in range(count)]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
def test_twenty_random_pairs_of_meshes(tmp_path: Path, seed: int) -> None:
    for number, (before, after) in enumerate(pairs(20, seed)):
        (tmp_path / str(number)).mkdir()
        save_and_load(tmp_path / str(number), before, after)


def save_and_load(tmp_path: Path, before: Mesh, after: Mesh) -> None:
    manifest = save(before, tmp_path)
    assert load(after, tmp_path, manifest) > 0
    stored = {field: 0 for field in FIELDS}
    for name, seal in manifest.files.items():
        with TensorFile(tmp_path / name, seal) as file:
            for entry, where in file.entries.items():
                field = entry.rpartition("/")[0]
                stored[field] += (where.end - where.begin) // where.dtype.itemsize
                assert not (file.load(entry) == -5).any()  # padding
    # Every element once, but for the halves of a fused box whose other half is a copy.
    total = sum(values_of(FIELDS[0], name).numel() for name, *_ in MODEL)
    assert all(total <= numel <= total + 24 * 5 for numel in stored.values())
    if before.tp <= 2:
        assert set(stored.values()) == {total}


def cut(start: int, length: int) -> Region:
    return Region((8, 2), (Cut(0, 8, ((start, length),)),))


def offer(rank: int, box: Region, **changes: object) -> LocalShards:
    return replace(LocalShards([ManifestEntry("w", box.shape, torch.float32)], [box], "equal", (rank,)), **changes)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"no rank has element \[3, 0\] of 'w'"):
        take([offer(0, cut(0, 3)), offer(1, cut(4, 4))], range(2))
    with pytest.raises(CheckpointError, match="one name must mean one global tensor"):
        take([offer(0, Region((8, 2))), offer(1, Region((8, 3)))], range(2))
    alone = {"alone": {"w": frozenset({"pp"})}}
    stages = [
        offer(0, Region((8, 2)), coordinates={"pp": 0}, **alone),
        offer(1, Region((8, 2)), coordinates={"pp": 1}, **alone),
    ]
    with pytest.raises(CheckpointError, match="rank 0 and rank 1 both have 'w'.*along pp"):
        take(stages, range(2))
    left = ManifestEntry("w", (8, 2), torch.float32, LEFT_OUT)
    assert take([offer(0, cut(0, 3), rows=[left])], range(2)).rows == [left]  # its values are stored nowhere


def test_of_equal_copies_the_lowest_rank_stores_one() -> None:
    taken = take(
        [offer(3, cut(0, 4)), offer(5, cut(4, 4)), offer(6, cut(0, 4)), offer(7, Region((8, 2)))], [3, 5, 6, 7]
    )
    assert taken.leaders == {"w": {3, 5, 7}}
    assert [group.files for group in taken.groups] == [
        ("rank-00000.safetensors",),
        ("rank-00001.safetensors",),
        ("rank-00003.safetensors",),
    ]


def read_thirds_of_factors(folder: Path, rows: int, width: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Load three slices of columns from two; gives the number of runs asked for, and of blocks read."""
    whole = torch.arange(rows * width, dtype=torch.int32).view(rows, width)
    boxes = [
        [Region((rows, width), (Cut(1, width, ((i * width // of, width // of),)),)) for i in range(of)] for of in (2, 3)
    ]
    offers, seals = [], {}
    for rank, box in enumerate(boxes[0]):
        offers.append(LocalShards([ManifestEntry("w", box.shape, torch.int32)], [box], "equal", (rank,)))
        entry = entry_of("value/w", whole.chunk(2, dim=1)[rank].reshape(-1))
        seals[rank_file(rank)] = write_tensors(folder / rank_file(rank), [entry], {})
    manifest = Manifest(*take(offers, range(2)).with_states([]), seals, {})
    source, filled, asked = NativeSource(folder, manifest, Ranks(), [set(seals)]), [], []
    fill, fetch = TensorFile._fill, NativeSource._fetch
    with monkeypatch.context() as patch:
        patch.setattr(TensorFile, "_fill", lambda self, *a: (filled.append(a), fill(self, *a)))
        patch.setattr(NativeSource, "_fetch", lambda self, one: (asked.extend(one), fetch(self, one)))
        for box, right in zip(boxes[1], whole.chunk(3, dim=1), strict=True):
            into = torch.zeros(box.numel, dtype=torch.int32)
            source.read([ReadRequest("value", manifest.rows[0], RegionRange(box, 0, box.numel), into)])
            assert torch.equal(into.view(rows, -1), right)
    return len(asked), len(filled)


@pytest.mark.parametrize("width", [6, 600])
def test_rows_are_not_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    elements = 2_000_000
    counts = []
    for times in (1, 2):
        (tmp_path / str(times)).mkdir()
        rows = times * elements // width
        counts.append(read_thirds_of_factors(tmp_path / str(times), rows, width, monkeypatch))
    asked, filled = zip(*counts, strict=True)
    assert asked == (4, 4)  # slices in common, whatever the number of rows
    # Each of three reads goes through a file or two, block by block.
    assert filled[0] <= 4 * (elements * 4 / 2 / 2**20 + 1) and filled[1] <= 2.2 * filled[0]
