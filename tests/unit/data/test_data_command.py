"""`ds_data`: figures of files that this test writes, and files that are wrong."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed.data.analyzer import DataAnalyzer
from deepspeed.data.cli import main
from deepspeed.data.indexed_dataset import MMapIndexedDatasetBuilder, write_index
from deepspeed.data.mixture import mixture_shares
from deepspeed.data.summary import histogram
from deepspeed.errors import ArgumentError, DataError

LENGTHS = [3, 1, 8, 2, 0, 7, 4, 1]


def write(prefix: Path, lengths: list[int] = LENGTHS, dtype: Any = np.uint16, dialect: Any = "deepspeed") -> str:
    builder = MMapIndexedDatasetBuilder(f"{prefix}.bin", dtype, dialect)
    for row, length in enumerate(lengths):
        builder.add_item(np.arange(length))
        if row % 3 == 2 or row + 1 == len(lengths):
            builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def ran(capsys: Any, *arguments: Any) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    out = capsys.readouterr()
    assert out.err == ""
    return out.out


def figures(capsys: Any, *arguments: Any) -> Any:
    return json.loads(ran(capsys, *arguments, "--json"))


@pytest.mark.parametrize(("dialect", "dtype"), [("deepspeed", np.uint16), ("megatron", np.uint16), ("both", np.int32)])
def test_look_at_a_pair(dialect: str, dtype: Any, tmp_path: Path, capsys: Any) -> None:
    prefix = write(tmp_path / "a", dtype=dtype, dialect="megatron" if dialect == "megatron" else "deepspeed")
    row = figures(capsys, "look", prefix)
    files = [Path(f"{prefix}.idx"), Path(f"{prefix}.bin")]
    assert row.pop("bytes") == {str(path): path.stat().st_size for path in files}
    assert row.pop("histogram") == [
        {"from": 0, "to": 0, "count": 1},
        {"from": 1, "to": 1, "count": 2},
        {"from": 2, "to": 3, "count": 2},
        {"from": 4, "to": 7, "count": 2},
        {"from": 8, "to": 15, "count": 1},
    ]
    assert row.pop("lengths") == {"min": 0, "median": 2.5, "mean": 26 / 8, "max": 8}
    numbers = {"rows": 8, "documents": 3, "tokens": 26, "dtype": np.dtype(dtype).name}
    assert row == {"prefix": prefix, "dialect": dialect} | numbers
    assert figures(capsys, "look", f"{prefix}.idx")["prefix"] == prefix
    text = ran(capsys, "look", f"{prefix}.bin").splitlines()
    assert text[0].startswith(f"{prefix}: 8 rows, 3 documents, 26 tokens, {np.dtype(dtype).name}")
    assert ("dtype code of megatron" in text[0]) == (dialect == "megatron")
    assert text[1] == "lengths: min 0, median 2.5, mean 3.2, max 8"
    assert text[3] == f" 1 to  1 {2:>12} {'#' * 40}" and text[-1] == f" 8 to 15 {1:>12} {'#' * 20}"


def test_bins_of_lengths() -> None:
    lengths = np.concatenate([np.arange(1, 2**12), 2 ** np.arange(12, 31), 2 ** np.arange(12, 31) - 1]).astype(np.int32)
    for row in histogram(lengths):
        assert row["count"] == int(((lengths >= row["from"]) & (lengths <= row["to"])).sum())
    assert sum(row["count"] for row in histogram(lengths)) == len(lengths) and histogram(lengths[:0]) == []


def analysis(folder: Path) -> str:
    dataset = [torch.tensor([value, 1]) for value in (5, 3, 9, 3, 1, 1)]
    DataAnalyzer(
        dataset,
        metric_names=["rarity", "counts"],
        metric_functions=[lambda batch: batch[:, 0], lambda batch: torch.bincount(batch.flatten(), minlength=10)],
        metric_types=["single_value_per_sample", "accumulate_value_over_samples"],
        metric_dtypes=[torch.int64, torch.int64],
        save_path=folder,
    ).run_map_reduce()
    return str(folder)


def test_look_at_an_analysis(tmp_path: Path, capsys: Any) -> None:
    folder = analysis(tmp_path)
    metrics = figures(capsys, "look", folder)["metrics"]
    assert metrics["rarity"] == {
        "type": "single_value_per_sample",
        "samples": 6,
        "distinct": 4,
        "percentile_rows": 4,
        "values": {"min": 1, "median": 3.0, "mean": 22 / 6, "max": 9},
        "lowest": [[4, 1], [5, 1], [1, 3], [3, 3], [0, 5]],
        "highest": [[2, 9], [0, 5], [1, 3], [3, 3], [4, 1]],
    }
    counts = metrics["counts"]
    assert (counts["elements"], counts["sum"], counts["largest"][:3]) == (10, 12, [[1, 8], [3, 2], [5, 1]])
    lines = ran(capsys, "look", folder).splitlines()
    assert lines[0] == "counts: sum of 10 elements, 12 in all"
    assert lines[4] == "  lowest: sample 4 = 1, sample 5 = 1, sample 1 = 3, sample 3 = 3, sample 0 = 5"
    (tmp_path / "rarity" / "rarity_index_to_metric.bin").unlink()
    assert main(["look", folder]) == 1
    assert "there is no file" in capsys.readouterr().err


def result(folder: Path, name: str, rows: list[list[Any]], dtype: Any = np.int64) -> None:
    builder = MMapIndexedDatasetBuilder(f"{folder}/m/m_{name}.bin", dtype, "megatron")
    for row in rows:
        builder.add_item(np.array(row, dtype))
    builder.finalize(f"{folder}/m/m_{name}.idx")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_to_metric": [[1]]}, "index_to_metric has 1 rows, and .*index_to_sample has 2"),
        ({"index_to_metric": [[1], []]}, "index_to_metric is damaged: row 1 has 0 values"),
        ({"sample_to_metric": [[1, 2], [2]]}, "sample_to_metric is damaged: row 0 has 2 values"),
        ({"index_to_sample": [[0], []]}, "index_to_sample has 1 ids for 2 samples"),
        (dict.fromkeys(("sample_to_metric", "index_to_metric", "index_to_sample"), []), "sample_to_metric has no rows"),
        ({"metric_value": []}, "metric_value is damaged: it has 0 rows"),
    ],
)
@pytest.mark.parametrize("json_", [[], ["--json"]])
def test_damaged_analyses_end_with_one_line(
    changes: dict[str, Any], message: str, json_: list[str], tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "m").mkdir()
    rows = {"sample_to_metric": [[1], [2]], "index_to_metric": [[1], [2]], "index_to_sample": [[0], [1]]}
    for name, content in (rows | {"index_to_sample_percentile_merged": [[0], [1]]} | changes).items():
        result(tmp_path, name, content)
    assert main(["look", str(tmp_path), *json_]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("ds_data: ") and err.count("\n") == 1
    assert re.search(message, err), err


def test_results_that_are_no_integers_or_have_gaps(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "m").mkdir()
    result(tmp_path, "metric_value", [[float("nan")]], np.float64)
    assert main(["look", str(tmp_path)]) == 1
    assert "metric_value has float64; the results of an analysis are integers" in capsys.readouterr().err
    for end in ("idx", "bin"):
        (tmp_path / "m" / f"m_metric_value.{end}").unlink()
    for name in ("sample_to_metric", "index_to_metric", "index_to_sample", "index_to_sample_percentile_merged"):
        result(tmp_path, name, [[0], [1]])
    index = tmp_path / "m" / "m_sample_to_metric.idx"
    content = index.read_bytes()
    index.write_bytes(content[:42] + struct.pack("<qq", 0, 0) + content[58:])  # both rows are the first element
    data = index.with_suffix(".bin")
    data.write_bytes(data.read_bytes()[:8])
    assert main(["look", str(tmp_path)]) == 1
    assert "m_sample_to_metric.bin has 1 elements; its rows have 2" in capsys.readouterr().err


def test_count(tmp_path: Path, capsys: Any) -> None:
    # sums of int32 lengths overflow: rows of 2^31 - 1 tokens, in a sparse file
    big = tmp_path / "big"
    write_index(f"{big}.idx", [2**31 - 1] * 3, [0, 3], np.uint8)
    with open(f"{big}.bin", "wb") as file:
        file.truncate(3 * (2**31 - 1))
    small = write(tmp_path / "small")
    answer = figures(capsys, "count", big, small)
    assert [row["tokens"] for row in answer["sources"]] == [3 * (2**31 - 1), 26]
    assert answer["all"] == {"rows": 11, "documents": 4, "tokens": 3 * (2**31 - 1) + 26}
    assert ran(capsys, "count", big, small).splitlines()[1].split()[1:] == ["3", "1", "6,442,450,941", "100.00%"]


def test_mixture(tmp_path: Path, capsys: Any) -> None:
    one, other = write(tmp_path / "one", [90, 10]), write(tmp_path / "other", [25])
    rows = figures(capsys, "mixture", one, other, "--tokens", "250", "--temperature", "2")["sources"]
    assert [row["taken_share"] for row in rows] == pytest.approx([2 / 3, 1 / 3])
    assert [row["taken"] for row in rows] == [167, 83]
    assert [row["epochs"] for row in rows] == pytest.approx([1.67, 3.32])
    rows = figures(capsys, "mixture", one, other, "--tokens", "1_000", "--weights", "1", "3")["sources"]
    assert [row["taken"] for row in rows] == [250, 750]
    rows = figures(capsys, "mixture", one, other, "--tokens", "125")["sources"]
    assert [row["taken"] for row in rows] == [100, 25] and [row["epochs"] for row in rows] == [1, 1]
    lines = ran(capsys, "mixture", one, other, "--tokens", "1.5K", "--weights", "1", "3").splitlines()
    assert lines[1].split() == [one, "100", "25.00%", "375", "3.750"] and lines[3].split() == ["all", "125", "1,500"]
    assert lines[4] == f"more than 4 epochs, which help less: {other}"


def test_shares_sum_to_the_total() -> None:
    draw = np.random.default_rng(0)
    for temperature in (0.5, 1.0, 3.3, 100.0):
        tokens = [int(count) for count in draw.integers(1, 10**12, 7)]
        shares = mixture_shares(tokens, temperature)
        ratios = [(count / tokens[0]) ** (1 / temperature) for count in tokens]
        assert shares == pytest.approx([ratio / sum(ratios) for ratio in ratios]) and sum(shares) == pytest.approx(1)
    assert mixture_shares([0, 5], 2.0) == [0, 1]
    for error, arguments in (
        (ArgumentError, ([1, 2], 0.0)),
        (ArgumentError, ([1, 2], float("nan"))),
        (ArgumentError, ([1, 2], 1.0, [1])),
        (ArgumentError, ([1, 2], 1.0, [1, -1])),
        (ArgumentError, ([1, 2], 1.0, [0, 0])),
        (ArgumentError, ([0, 0], 1.0)),
        (DataError, ([0, 2], 1.0, [1, 1])),
    ):
        with pytest.raises(error):
            mixture_shares(*arguments)


def test_length(tmp_path: Path, capsys: Any) -> None:
    prefix = write(tmp_path / "a")
    row = figures(capsys, "length", prefix, "--budget", "7")  # without the rows of 8 and 0: 18 tokens
    assert row["tokens"] == 18 and row["over_budget"] == 1 and row["empty"] == 1 and row["packs"] == 3
    assert row["padding_unpacked"] == pytest.approx(1 - 18 / 42) and row["padding_packed"] == pytest.approx(1 - 18 / 21)
    lines = ran(capsys, "length", prefix, "--budget", "7").splitlines()
    assert lines[1:] == [
        "one by one: 6 rows, 57.14% padding",
        "packed: 3 rows, 14.29% padding",
        "left out: 1 longer rows, 1 empty ones",
    ]


def test_pictures(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    prefix, folder = write(tmp_path / "a"), analysis(tmp_path / "analysis")
    for source in (prefix, folder):
        ran(capsys, "look", source, "--picture", tmp_path / "picture.png")
        assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
        (tmp_path / "picture.png").unlink()
    assert main(["look", prefix, "--picture", str(tmp_path / "picture.odd")]) == 1
    assert "picture.odd: Format 'odd' is not supported" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("deepspeed.data.cli.find_spec", lambda name: None)
    assert main(["look", prefix, "--picture", str(tmp_path / "picture.png")]) == 1
    assert capsys.readouterr().err == "ds_data: --picture needs matplotlib: pip install 'deepspeed[plot]'\n"


def damaged(folder: Path, how: str) -> str:
    prefix = write(folder / "a")
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    content = index.read_bytes()
    if how == "no data":
        data.unlink()
    elif how == "short data":
        data.write_bytes(data.read_bytes()[:-2])
    elif how == "short index":
        index.write_bytes(content[:-8])
    elif how == "empty index":
        index.write_bytes(b"")
    elif how == "other index":
        index.write_bytes(b"x" * 100)
    elif how == "negative length":
        index.write_bytes(content[:34] + struct.pack("<i", -3) + content[38:])
    else:
        assert how == "nothing"
        return str(folder / "b")
    return prefix


@pytest.mark.parametrize("command", ["look", "count", "mixture", "length"])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("nothing", "there is no file .*b.idx and no file .*b.bin"),
        ("no data", "there is no file .*a.bin"),
        ("short data", "a.bin has 50 bytes; .* the file is truncated"),
        ("short index", "a.idx is truncated"),
        ("empty index", "a.idx is no index of Megatron's pair of files"),
        ("other index", "a.idx is no index of Megatron's pair of files"),
        ("negative length", "a.idx is damaged: row 0 has a negative length"),
    ],
)
def test_damaged_files_end_with_one_line(command: str, how: str, message: str, tmp_path: Path, capsys: Any) -> None:
    options = {"mixture": ["--tokens", "5"], "length": ["--budget", "4"]}.get(command, [])
    assert main([command, damaged(tmp_path, how), *options]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("ds_data: ") and err.count("\n") == 1
    assert re.search(message, err), err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mixture", "{a}", "--tokens", "few"], "--tokens few: pass a whole number"),
        (["mixture", "{a}", "--tokens", "1.5"], "--tokens 1.5: pass a whole number"),
        (["mixture", "{a}", "--tokens", "1e999999999"], "--tokens 1e999999999: pass a whole number"),
        (["mixture", "{a}", "--tokens", "nan"], "--tokens nan: pass a whole number"),
        (["mixture", "{a}", "--tokens", "0"], "a run of 0 tokens"),
        (["mixture", "{a}", "--tokens", "5", "--weights", "1", "2"], "2 weights for 1 sources"),
        (["mixture", "{a}", "--tokens", "5", "--temperature", "-1"], "temperature -1.0 must be a number above 0"),
        (["length", "{a}", "--budget", "0"], "budget 0 must be at least 1"),
        (["look", "{folder}"], "has no results of an analysis"),
        (["look", "{a}", "--picture", "{folder}/none/a.png"], "No such file or directory"),
    ],
)
def test_wrong_arguments_end_with_one_line(arguments: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    places = {"a": write(tmp_path / "a"), "folder": str(tmp_path)}
    assert main([argument.format(**places) for argument in arguments]) == 1
    err = capsys.readouterr().err
    assert err.startswith("ds_data: ") and message in err and err.count("\n") == 1


@pytest.mark.slow
def test_the_command_in_a_process_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deepspeed.data.cli", "count"]
    done = subprocess.run([*command, write(tmp_path / "a")], capture_output=True, text=True, check=True)
    assert "26" in done.stdout and done.stderr == ""
    done = subprocess.run([*command, tmp_path / "b"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
