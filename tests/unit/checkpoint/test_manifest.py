"""The manifest: small at any scale, the same after a round trip, and reads that cover every element once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.checkpoint.manifest import VALUE, CutGroup, Manifest, Row, StateRule, rank_file
from deepspeed.checkpoint.tensorfile import Seal
from deepspeed.errors import CheckpointCorruptError

HIDDEN, INNER, WORDS, LAYERS, RANKS = 8192, 28672, 128256, 80, 512


def seventy_billion() -> Manifest:
    """A manifest of a Llama of 70 B parameters on 512 ranks, each block a group."""
    inside = [(HIDDEN, HIDDEN), (1024, HIDDEN), (1024, HIDDEN), (HIDDEN, HIDDEN), (INNER, HIDDEN), (INNER, HIDDEN)]
    inside += [(HIDDEN, INNER), (HIDDEN,), (HIDDEN,)]
    shapes = [[(WORDS, HIDDEN)], *([inside] * LAYERS), [(HIDDEN,)], [(WORDS, HIDDEN)]]
    rows, groups = [], []
    for block, members in enumerate(shapes):
        rows += [Row(f"model.layers.{block}.part.{i}.weight", s, torch.float32, state=0) for i, s in enumerate(members)]
        groups.append(CutGroup(len(members), "equal", RANKS))
    state = StateRule({"exp_avg": torch.float32, "exp_avg_sq": torch.float32}, {}, {"step": 1.0})
    return Manifest(rows, groups, [state], {rank_file(r): Seal(1 << 30, r) for r in range(RANKS)}, {"tag": "x"})


def plan_of(manifest: Manifest, rank: int, ranks: int) -> int:
    """The reads one rank of another topology makes; how many."""
    count = at = 0
    for group in manifest.groups:
        members = manifest.rows[at : at + group.count]
        at += group.count
        for range_ in CutGroup(group.count, "equal", ranks).layout([row.numel for row in members]).ranges(rank):
            for field in (VALUE, "state/exp_avg", "state/exp_avg_sq"):
                count += len(list(manifest.reads(field, members[range_.index], range_.start, range_.stop)))
    return count


def test_seventy_billion_parameters_on_512_ranks() -> None:
    best = 10.0
    for _ in range(5):
        started = time.process_time()
        data = seventy_billion().to_bytes()
        manifest = Manifest.from_bytes(data, Path("x"))
        assert plan_of(manifest, 299, 300) > 500
        best = min(best, time.process_time() - started)
    assert sum(row.numel for row in manifest.rows) > 70e9 and len(data) < 10 << 20
    assert best < 1.0


numels = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(numels, st.sampled_from(["equal", "between"]), st.integers(1, 7), st.data())
def test_reads_cover_every_element_once(sizes: list[int], rule: str, ranks: int, data: st.DataObject) -> None:
    rows = [Row(f"p{i}", (size,), torch.float32) for i, size in enumerate(sizes)]
    manifest = Manifest(rows, [CutGroup(len(rows), rule, ranks)], [], {}, {})
    stored: dict[tuple[str, str], list[int]] = {}
    layout = manifest.groups[0].layout(sizes)
    for rank in range(ranks):
        for piece in layout.ranges(rank):
            stored[rank_file(rank), f"value/p{piece.index}"] = list(range(piece.start, piece.stop))
    index = data.draw(st.integers(0, len(rows) - 1))
    start = data.draw(st.integers(0, sizes[index]))
    stop = data.draw(st.integers(start, sizes[index]))
    found = [-1] * (stop - start)
    for read in manifest.reads(VALUE, rows[index], start, stop):
        values = stored[read.file, read.entry][read.start : read.stop]
        assert len(values) == read.stop - read.start and found[read.at : read.at + len(values)] == [-1] * len(values)
        found[read.at : read.at + len(values)] = values
    assert found == list(range(start, stop))


def test_a_changed_manifest_is_refused() -> None:
    data = seventy_billion().to_bytes()
    edited = [data.replace(b'"equal"', b'"eqval"', 1), data.replace(b"crc32", b"crc33", 1)]
    for changed in (*edited, data[:-5], b"", b"{}"):
        with pytest.raises(CheckpointCorruptError, match="x"):
            Manifest.from_bytes(changed, Path("x"))
    again = Manifest.from_bytes(data, Path("x"))
    assert again.rows == seventy_billion().rows and again.states == seventy_billion().states
