"""What was fed: tokens, padding, lengths, sources, and the picture."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path

import pytest
import torch

from deepspeed.data.feed_record import FeedRecord
from deepspeed.data.loader import DeepSpeedDataLoader
from deepspeed.data.mixture import Mixture
from deepspeed.data.packing import PackedDataset, pack
from deepspeed.errors import DataError


def test_padded_and_packed_batches() -> None:
    record = FeedRecord()
    ids = torch.tensor([[5, 6, 0, 0], [7, 0, 9, 8]])
    record.add(ids)
    record.add({"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]])})
    assert (record.tokens, record.padding, record.lengths) == ([6, 5], [2, 3], [2, 4, 3, 2])
    assert record.padding_share == 5 / 16
    sequences = [[7, 3, 9], [5, 5, 5, 5, 2], [8, 1], [4, 6, 2, 9]]
    rows = DeepSpeedDataLoader(PackedDataset(sequences, pack([3, 5, 2, 4], 8, seed=0)), 2)  # type: ignore[arg-type]
    packed = FeedRecord()
    assert len(list(packed.of(rows))) == 1
    assert sorted(packed.lengths) == [2, 3, 4, 5] and packed.tokens == [14] and packed.padding == [2]
    with pytest.raises(DataError, match="dict of \\['x'\\]"):
        record.add({"x": ids})
    mapped = FeedRecord()
    mapped.add(UserDict({"input_ids": ids, "attention_mask": ids > 0}))  # as the BatchEncoding of Transformers is
    assert (mapped.tokens, mapped.padding) == ([5], [3])
    with pytest.raises(DataError, match="UserDict of \\['1', 'x'\\]"):
        mapped.add(UserDict({"x": ids, 1: ids}))


def test_sources_and_the_picture(tmp_path: Path) -> None:
    sources = {"short": [torch.ones(4, dtype=torch.long)] * 8, "other": [torch.ones(4, dtype=torch.long)] * 24}
    mixture = Mixture(sources, [1, 3], by="samples")
    record = FeedRecord()
    for epoch in range(2):
        loader = DeepSpeedDataLoader(mixture, 4, rank=epoch % 2, world=2)
        assert all(batch.shape == (4, 4) for batch in record.of(loader))
    assert [counts.tolist() for counts in record.sources] == [[2, 6]] * 8 and record.names == ["short", "other"]
    pytest.importorskip("matplotlib")
    record.save_picture(tmp_path / "fed.png")
    assert (tmp_path / "fed.png").read_bytes()[:4] == b"\x89PNG"
    plain = FeedRecord()
    with pytest.raises(DataError, match="no batch was counted"):
        plain.save_picture(tmp_path / "none.png")
    plain.add(torch.ones(2, 3, dtype=torch.long))
    plain.save_picture(tmp_path / "plain.svg")
    assert b"<svg" in (tmp_path / "plain.svg").read_bytes()


def test_a_picture_of_padding_only(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    record = FeedRecord()
    record.add(torch.zeros(2, 3, dtype=torch.long))
    assert record.lengths == [] and record.padding_share == 1
    record.save_picture(tmp_path / "padding.svg")
    assert b"<svg" in (tmp_path / "padding.svg").read_bytes()


def test_batches_with_and_without_sources_in_one_record(tmp_path: Path) -> None:
    rows = [torch.ones(4, dtype=torch.long)] * 4
    record = FeedRecord()
    record.add(torch.ones(2, 4, dtype=torch.long))
    list(record.of(DeepSpeedDataLoader(Mixture({"a": rows, "b": rows}, [1, 1], by="samples"), 4)))
    list(record.of(DeepSpeedDataLoader(rows, 2)))  # type: ignore[arg-type]
    list(record.of(DeepSpeedDataLoader(Mixture({"c": rows, "b": rows}, [1, 1], by="samples"), 8)))
    assert len(record.tokens) == 6 and record.source_batches == [1, 2, 5] and record.names == ["a", "b", "c"]
    assert [counts.tolist() for counts in record.sources] == [[2, 2], [2, 2], [0, 4, 4]]
    pytest.importorskip("matplotlib")
    record.save_picture(tmp_path / "fed.svg")
    assert b"<svg" in (tmp_path / "fed.svg").read_bytes()
