"""Exports, comparison and copies of checkpoints, and errors that ranks share, without an engine."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from deepspeed.checkpoint.cli import differences
from deepspeed.checkpoint.format.manifest import FROZEN, LEFT_OUT, VALUE, ManifestEntry, entry_name
from deepspeed.checkpoint.huggingface import INDEX, FolderSource, bytes_of, write_sharded
from deepspeed.checkpoint.load.reader import TensorSource
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.errors import ArgumentError, CheckpointCorruptError, CheckpointError, CheckpointMissingError


@pytest.mark.parametrize(("limit", "files"), [(None, 1), ("1KB", 1), (100, 2), ("8", 3)])
def test_files_by_their_largest_size(tmp_path: Path, limit: Any, files: int) -> None:
    state = {name: torch.full((10,), float(place)) for place, name in enumerate("abc")}
    written = write_sharded(state, tmp_path, limit, safe=True)
    assert len(written) == files and (tmp_path / INDEX).exists() == (files > 1)
    source = FolderSource(tmp_path, Ranks())
    assert all(torch.equal(source.whole(name), value) for name, value in state.items())


def test_sizes() -> None:
    assert [bytes_of(size) for size in ("5GB", " 1.5 kib", 7, ".5MB")] == [5e9, 1536, 7, 5e5]
    for wrong in ("", "GB", "1.2.3GB", ".", "5 TBs", -1):
        with pytest.raises(ArgumentError, match="max_shard_size"):
            bytes_of(wrong)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 1}'])
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointCorruptError, match="no index"):
        FolderSource(tmp_path, Ranks())


def frozen(path: str, value: torch.Tensor | None) -> TensorSource:
    """A checkpoint of one frozen parameter, with its value or without."""
    row = ManifestEntry("w", (3,), torch.float32, LEFT_OUT if value is None else FROZEN)
    return TensorSource(Path(path), [row], {} if value is None else {entry_name(VALUE, "w"): [(0, value)]})


def test_checkpoints_without_frozen_values_are_compared() -> None:
    ones = torch.ones(3)
    assert not list(differences(frozen("a", None), frozen("b", None)))
    assert not list(differences(frozen("a", ones), frozen("b", ones)))
    assert list(differences(frozen("a", ones), frozen("b", None))) == ["w: values only in a"]
    assert list(differences(frozen("a", None), frozen("b", ones))) == ["w: values only in b"]


class Two(Ranks):
    """This process as the second of two ranks, the first of which reports `other`."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.rank, self.size, self.other = 1, 2, other

    def gather(self, local: Any) -> list[Any]:
        return [self.other, local]


class Heard(Ranks):
    """This process as one rank; notes what it reports."""

    def gather(self, local: Any) -> list[Any]:
        self.reported = local
        return [local]


ERRORS = [None, CheckpointCorruptError("bytes"), FileNotFoundError("gone"), CheckpointError("shape"), OSError("disk")]


def test_ranks_go_on_alike_after_different_errors() -> None:
    """Either all ranks raise an error after which another checkpoint is loaded, or none does."""

    def raised_by(ranks: Ranks, error: Exception | None) -> Exception | None:
        try:
            with ranks.together("reading"):
                if error is not None:
                    raise error
        except Exception as problem:
            return problem
        return None

    for first in ERRORS:
        heard = Heard()
        assert raised_by(heard, first) is first
        for own in ERRORS:
            raised = raised_by(Two(heard.reported), own)
            both = [error for error in (first, own) if error is not None]
            assert (raised is None) == (not both)
            corrupt = any(isinstance(error, CheckpointCorruptError) for error in both)
            missing = any(isinstance(error, FileNotFoundError) for error in both)
            assert isinstance(raised, CheckpointCorruptError) == corrupt
            assert isinstance(raised, FileNotFoundError) == (missing and not corrupt)
            if own is None and first is not None:
                assert isinstance(raised, CheckpointError) and "reading failed on rank 0" in str(raised)
                assert isinstance(raised, CheckpointMissingError) == isinstance(first, FileNotFoundError)


def test_copies_keep_the_classes_of_containers() -> None:
    whole = torch.arange(6.0)
    pair = namedtuple("pair", "left right")
    state: Any = OrderedDict(a=whole[:2], b=[whole[2:3], (whole[3:], 1)])
    state._metadata = {"version": 1}
    by_default = defaultdict(list, x=pair(whole[1:2], None))
    maxima = torch.stack([whole, whole]).max(1)
    copied = clone_tensors_for_torch_save({"state": state, "default": by_default, "maxima": maxima})
    assert type(copied["state"]) is OrderedDict and copied["state"]._metadata == {"version": 1}
    assert copied["default"]["x"] == pair(torch.tensor([1.0]), None) and copied["default"]["new"] == []
    assert type(copied["maxima"]) is type(maxima) and torch.equal(copied["maxima"].values, maxima.values)
    output = clone_tensors_for_torch_save(BaseModelOutput(last_hidden_state=whole[:2]))
    assert type(output) is BaseModelOutput and output.last_hidden_state.untyped_storage().nbytes() == 8
    assert copied["state"]["a"].untyped_storage().nbytes() == 8 and state["a"].untyped_storage().nbytes() == 24
    assert torch.equal(copied["state"]["b"][1][0], whole[3:]) and state["b"][0].data_ptr() == whole[2:].data_ptr()
