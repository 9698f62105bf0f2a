"""Ranks of a mesh without processes: what each holds of a model, how ZeRO cuts it, and what it would store."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from deepspeed.checkpoint.format.manifest import VALUE, Manifest, ManifestEntry, StateRule, rank_file, state_field
from deepspeed.checkpoint.format.safetensors_file import write_tensors
from deepspeed.checkpoint.load.reader import NativeSource, ReadRequest
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.checkpoint.save.save_plan import LocalShards, Snapshot, take
from deepspeed.zero.api.state_view import LAYOUT_RULES, StateRange
from deepspeed.zero.layout.placement import Cut, Placement
from deepspeed.zero.layout.regions import Region, RegionRange

FIELDS = (VALUE, state_field("exp_avg"))
RULE = StateRule({"exp_avg": torch.bfloat16}, {}, {"step": 3.0})
Segments = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Mesh:
    """Sizes; `seed` draws how tensors are grouped, and by which rule they are cut."""

    pp: int
    replicate: int
    shard: int
    tp: int
    seed: int

    @property
    def ranks(self) -> int:
        return self.pp * self.replicate * self.shard * self.tp

    def coordinates(self) -> Iterator[tuple[int, int, int, int]]:
        """(stage, replica, shard, slice) of every rank, in rank order."""
        return itertools.product(range(self.pp), range(self.replicate), range(self.shard), range(self.tp))

    def rank(self, stage: int, replica: int, shard: int, at: int) -> int:
        return ((stage * self.replicate + replica) * self.shard + shard) * self.tp + at


def evenly(size: int, at: int, of: int) -> Segments:
    """An even part of a dim, the last ones smaller, filled up with padding so that all ranks have equal shapes."""
    step = -(-size // of)
    start, stop = min(at * step, size), min((at + 1) * step, size)
    return (((start, stop - start),) if start < stop else ()) + (
        ((-1, step - stop + start),) if stop - start < step else ()
    )


def fused(at: int, of: int) -> Segments:
    """Queries, keys and values in one dim of 24, cut by heads; keys and values have two heads, copied beyond."""
    q, kv = 12, 6
    step, head = q // of, min(at * 2 // of, 1)
    heads = (q + head * 3, 3) if of > 1 else (q, kv)
    values = (q + kv + head * 3, 3) if of > 1 else (q + kv, kv)
    return ((at * step, step), heads, values)


# name, shape, stage (of two; None: on all), dim to segments by slice
MODEL: list[tuple[str, tuple[int, ...], int | None, dict[int, str]]] = [
    ("embed", (11, 6), None, {0: "even"}),
    ("0.qkv", (24, 5), 0, {0: "fused"}),
    ("0.out", (5, 13), 0, {1: "even"}),
    ("0.norm", (5,), 0, {}),
    ("0.experts", (4, 5, 7), 0, {0: "outer", 2: "inner"}),
    ("1.up", (12, 8), 1, {0: "even"}),
    ("1.down", (8, 12), 1, {1: "even"}),
    ("1.scale", (), 1, {}),
    ("1.conv", (3, 7, 3), 1, {1: "even"}),
    ("1.norm", (17,), 1, {}),
]


def stage_of(mesh: Mesh, stage: int) -> list[tuple[str, Region]]:
    """Names and, for slice 0, boxes of a stage."""
    return [(name, Region(shape)) for name, shape, where, _ in MODEL if mesh.pp == 1 or where in (None, stage)]


def box_of(name: str, mesh: Mesh, at: int) -> Region:
    shape, cuts = next((shape, cuts) for one, shape, _, cuts in MODEL if one == name)
    outer = 2 if mesh.tp == 4 else 1
    ways = {
        "even": lambda size: evenly(size, at, mesh.tp),
        "fused": lambda _: fused(at, mesh.tp),
        "outer": lambda size: evenly(size, at // 2 if outer == 2 else 0, outer),
        "inner": lambda size: evenly(size, at % (mesh.tp // outer), mesh.tp // outer),
    }
    placed = [Cut(dim, shape[dim], ways[how](shape[dim])) for dim, how in cuts.items()] if mesh.tp > 1 else []
    local = list(shape)
    for cut in placed:
        local[cut.dim] = cut.local_size
    return Region.of(Placement(tuple(placed)), local)


def values_of(field: str, name: str) -> torch.Tensor:
    """The global tensor: no two fields or names share a value."""
    shape = next(shape for one, shape, *_ in MODEL if one == name)
    number = 200 * [one for one, *_ in MODEL].index(name)
    made = torch.arange(1, torch.Size(shape).numel() + 1).reshape(shape) + number
    return made.float() if field == VALUE else (made % 251).bfloat16()


def local_of(box: Region, whole: torch.Tensor) -> torch.Tensor:
    """The rank's tensor, by indexing; padding is -5, which nobody may store."""
    made = whole
    for cut in box.cuts:
        index = torch.cat([torch.arange(s, s + n) if s >= 0 else torch.full((n,), -1) for s, n in cut.segments])
        made = made.index_select(cut.dim, index.clamp(min=0))
        made = made.movedim(cut.dim, 0).clone()
        made[index < 0] = -5
        made = made.movedim(0, cut.dim)
    return made.contiguous()


def grouped(mesh: Mesh, stage: int) -> list[tuple[str, list[str]]]:
    """The groups of a stage: (rule, names)."""
    draw, names, found = random.Random(mesh.seed * 7 + stage), [name for name, _ in stage_of(mesh, stage)], []
    draw.shuffle(names)
    while names:
        count = draw.randint(1, 4)
        found.append((draw.choice(["equal", "between"]), names[:count]))
        names = names[count:]
    return found


def held(mesh: Mesh, at: tuple[int, int, int, int]) -> Iterator[tuple[LocalShards, list[tuple[int, int, int]]]]:
    """What a rank holds: its offers, and (index, start, stop) of the slices that are its own."""
    stage, replica, shard, slice_ = at
    ranks = tuple(mesh.rank(stage, replica, one, slice_) for one in range(mesh.shard))
    for rule, names in grouped(mesh, stage):
        boxes = [box_of(name, mesh, slice_) for name in names]
        rows = [ManifestEntry(name, box.shape, torch.float32) for name, box in zip(names, boxes, strict=True)]
        layout = LAYOUT_RULES[rule]([box.numel for box in boxes], mesh.shard)
        yield LocalShards(rows, boxes, rule, ranks), [(r.index, r.start, r.stop) for r in layout.ranges(shard)]


def capture(mesh: Mesh, at: tuple[int, int, int, int]) -> Snapshot:
    made = Snapshot()
    for offer, ranges in held(mesh, at):
        made.offers.append(offer)
        for index, start, stop in ranges:
            name, box = offer.rows[index].name, offer.boxes[index]
            for field in FIELDS:
                flat = local_of(box, values_of(field, name)).reshape(-1)[start:stop]
                made.add(field, StateRange(name, box, start, stop, flat.dtype, lambda flat=flat: flat))
            if start == 0:
                made.reports[name, offer.leader] = (json.dumps(RULE.to_json()), 0)
    return made


def save(mesh: Mesh, folder: Path) -> Manifest:
    """Write what every rank writes; gives the manifest as it is read back."""
    captured = [capture(mesh, at) for at in mesh.coordinates()]
    offers = [offer for rank, one in enumerate(captured) for offer in one.offers if offer.leader == rank]
    taken = take(offers, range(mesh.ranks))
    files = {}
    for rank, one in enumerate(captured):
        entries = one.taken(taken.leaders)
        files[rank_file(rank)] = write_tensors(folder / rank_file(rank), entries, {})
    rows, groups, states = taken.with_states([one.reports for one in captured])
    return Manifest.from_bytes(Manifest(rows, groups, states, files, {}).to_bytes(), folder)


def load(mesh: Mesh, folder: Path, manifest: Manifest) -> int:
    """Read what every rank of a mesh needs, and compare; gives the number of elements."""
    source, count = NativeSource(folder, manifest, Ranks(), [set(manifest.files)]), 0
    for at in mesh.coordinates():
        wanted, checks = [], []
        for offer, ranges in held(mesh, at):
            for index, start, stop in ranges:
                row, box = manifest.row(offer.rows[index].name), offer.boxes[index]
                assert row is not None
                for field in FIELDS:
                    right = local_of(box, values_of(field, row.name)).reshape(-1)[start:stop]
                    into = torch.full_like(right, 7)
                    wanted.append(ReadRequest(field, row, RegionRange(box, start, stop), into))
                    checks.append((into, right.clamp(min=0)))
                    count += into.numel()
        source.read(wanted)
        assert all(torch.equal(into, right) for into, right in checks)
    return count
