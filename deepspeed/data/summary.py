"""Figures of token files and of analyses, for the command `ds_data`: plain numbers, exact where they count tokens."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed.data.analysis_files import RESULTS, result_prefix
from deepspeed.data.analysis_map import ACCUMULATED, SINGLE
from deepspeed.data.index_lists import Array
from deepspeed.data.indexed_dataset import DTYPES, HEADER, MMapIndexedDataset, data_file_path, index_file_path
from deepspeed.data.mixture import mixture_shares
from deepspeed.data.packing import pack
from deepspeed.errors import ArgumentError, DataError

_EXAMPLES = 5  # samples that are listed at each end of a metric
_LISTED = 10  # elements of a sum that are listed


def open_pair(prefix: str) -> MMapIndexedDataset:
    """Open a pair of files by its prefix or by one of its paths.

    Raises:
        DataError: a file is missing or damaged.
    """
    prefix = prefix.removesuffix(".idx").removesuffix(".bin")
    missing = [path for path in (index_file_path(prefix), data_file_path(prefix)) if not os.path.isfile(path)]
    if missing:
        raise DataError(f"there is no file {' and no file '.join(missing)}")
    pair = MMapIndexedDataset(prefix)
    if len(pair) and int(pair.sizes.min()) < 0:
        raise DataError(f"{index_file_path(prefix)} is damaged: row {int(pair.sizes.argmin())} has a negative length")
    return pair


def _prefix(pair: MMapIndexedDataset) -> str:
    return pair.__getstate__()[0]


def histogram(values: Array) -> list[dict[str, int]]:
    """Return the counts of integers of at least 0 by powers of two: rows with `from`, `to` and `count`."""
    if not values.size:
        return []
    bits = np.zeros(values.size, np.int64)
    positive = values > 0
    bits[positive] = np.frexp(values[positive].astype(np.float64))[1]  # exact below 2^53
    counts = np.bincount(bits)
    first = int(np.flatnonzero(counts)[0])
    return [
        {"from": 0 if not power else 2 ** (power - 1), "to": 0 if not power else 2**power - 1, "count": int(count)}
        for power, count in enumerate(counts)
        if power >= first
    ]


def _spread(values: Array) -> dict[str, Any]:
    if not values.size:
        return {"min": None, "median": None, "mean": None, "max": None}
    return {
        "min": int(values.min()),
        "median": float(np.median(values)),
        "mean": float(values.mean(dtype=np.float64)),
        "max": int(values.max()),
    }


def describe_pair(prefix: str) -> dict[str, Any]:
    """Return what a pair of files has: rows, documents, tokens, dtype, lengths and bytes.

    Args:
        prefix: prefix of the pair.

    Returns:
        `prefix`, `rows`, `documents`, `tokens`, `dtype`, `dialect` ("both", "deepspeed" or "megatron"), `bytes` (by
        file), `lengths` (`min`, `median`, `mean`, `max`) and `histogram` (see `histogram`).

    Raises:
        DataError: a file is missing or damaged.
    """
    pair = open_pair(prefix)
    paths = [index_file_path(_prefix(pair)), data_file_path(_prefix(pair))]
    with open(paths[0], "rb") as file:
        code = HEADER.unpack(file.read(HEADER.size))[2]
    dialects = [name for name, table in DTYPES.items() if table.get(code) == pair.dtype]
    return {
        "prefix": _prefix(pair),
        "rows": len(pair),
        "documents": max(0, len(pair.doc_idx) - 1),
        "tokens": int(pair.sizes.sum(dtype=np.int64)),
        "dtype": pair.dtype.name,
        "dialect": dialects[0] if len(dialects) == 1 else "both",
        "bytes": {path: os.path.getsize(path) for path in paths},
        "lengths": _spread(pair.sizes),
        "histogram": histogram(pair.sizes),
    }


def describe_analysis(folder: str) -> dict[str, Any]:
    """Return what the folder of an analysis has: for each metric, its type, range and some samples.

    Returns:
        `folder` and `metrics`, by name. Of single values: `type`, `samples`, `distinct`, `percentile_rows`, `values`
        (as `lengths` of `describe_pair`), and `lowest` and `highest`: up to five ids with their values. Of sums:
        `type`, `elements`, `sum`, and `largest`: up to ten indices with their elements.

    Raises:
        DataError: the folder has no results, or files are missing or damaged.
    """
    names = sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
    metrics = {name: row for name in names if (row := _describe_metric(folder, name))}
    if not metrics:
        raise DataError(
            f"{folder} has no results of an analysis: it has no <metric>/<metric>_sample_to_metric.idx, and no "
            "<metric>/<metric>_metric_value.idx"
        )
    return {"folder": folder, "metrics": metrics}


def _describe_metric(folder: str, name: str) -> dict[str, Any] | None:
    prefixes = {result: result_prefix(folder, name, result) for results in RESULTS.values() for result in results}
    present = {result for result, prefix in prefixes.items() if os.path.exists(index_file_path(prefix))}
    if "metric_value" in present:
        pair = _open_result(str(prefixes["metric_value"]))
        if len(pair) != 1:
            raise DataError(f"{_prefix(pair)} is damaged: it has {len(pair)} rows, and a sum is one")
        total = pair[0]
        largest = np.argsort(-total.astype(np.float64), kind="stable")[:_LISTED]
        return {
            "type": ACCUMULATED,
            "elements": len(total),
            "sum": sum(map(int, total)) if total.size < 2**20 else int(total.sum(dtype=np.int64)),
            "largest": [[int(index), int(total[index])] for index in largest],
        }
    if not present:
        return None
    values, distinct, samples, merged = (_open_result(str(prefixes[result])) for result in RESULTS[SINGLE])
    _check_single(values, distinct, samples)
    every = _elements(values)
    ends = []
    for rows in (range(len(samples)), range(len(samples) - 1, -1, -1)):
        listed = ([int(id_), int(distinct[row][0])] for row in rows for id_ in samples[row])
        ends.append(list(itertools.islice(listed, _EXAMPLES)))
    return {
        "type": SINGLE,
        "samples": len(values),
        "distinct": len(distinct),
        "percentile_rows": len(merged),
        "values": _spread(every),
        "lowest": ends[0],
        "highest": ends[1],
    }


def _open_result(prefix: str) -> MMapIndexedDataset:
    pair = open_pair(prefix)
    if pair.dtype.kind not in "iu":
        raise DataError(f"{_prefix(pair)} has {pair.dtype.name}; the results of an analysis are integers")
    return pair


def _check_single(values: MMapIndexedDataset, distinct: MMapIndexedDataset, samples: MMapIndexedDataset) -> None:
    """Check that results of single values belong together.

    Raises:
        DataError: there are no samples, a value is missing, or the numbers of rows differ.
    """
    if not len(values):
        raise DataError(f"{_prefix(values)} has no rows: an analysis has at least one sample")
    for pair in (values, distinct):
        if (pair.sizes != 1).any():
            row = int(np.flatnonzero(pair.sizes != 1)[0])
            raise DataError(f"{_prefix(pair)} is damaged: row {row} has {int(pair.sizes[row])} values; each has one")
    if len(distinct) != len(samples):
        raise DataError(
            f"{_prefix(distinct)} has {len(distinct)} rows, and {_prefix(samples)} has {len(samples)}: they are not of "
            "one analysis"
        )
    ids = int(samples.sizes.sum(dtype=np.int64))
    if ids != len(values):
        raise DataError(f"{_prefix(samples)} has {ids} ids for {len(values)} samples: it is damaged, or of another one")


def _elements(pair: MMapIndexedDataset) -> Array:
    """Return the elements of all rows of a pair that this package or upstream has written: rows without gaps.

    Raises:
        DataError: the data file has fewer elements.
    """
    count = int(pair.sizes.sum(dtype=np.int64))
    elements = np.fromfile(data_file_path(_prefix(pair)), pair.dtype, count)
    if len(elements) < count:
        raise DataError(f"{data_file_path(_prefix(pair))} has {len(elements)} elements; its rows have {count}")
    return elements


def curves(figures: dict[str, Any]) -> dict[str, list[float]]:
    """Return what `ds_data look` draws: by title, the values at the percentiles 0 to 100.

    Args:
        figures: of `describe_pair` (lengths) or `describe_analysis` (each metric with one value per sample).
    """
    if "metrics" not in figures:
        sizes = open_pair(figures["prefix"]).sizes
        panels = (
            {f"{os.path.basename(figures['prefix'])}: tokens of {figures['rows']:,} rows": sizes} if sizes.size else {}
        )
    else:
        names = [name for name, row in figures["metrics"].items() if row["type"] == SINGLE]
        prefixes = {name: str(result_prefix(figures["folder"], name, RESULTS[SINGLE][0])) for name in names}
        panels = {name: _elements(open_pair(prefix)) for name, prefix in prefixes.items()}
    return {name: np.percentile(values, np.arange(101)).tolist() for name, values in panels.items()}


def count_tokens(prefixes: Sequence[str]) -> list[dict[str, Any]]:
    """Return the numbers of rows, documents and tokens of each source, and its share of all tokens.

    Args:
        prefixes: prefixes of pairs of files.

    Raises:
        DataError: a file is missing or damaged.
    """
    rows = []
    for prefix in prefixes:
        pair = open_pair(prefix)
        tokens, documents = int(pair.sizes.sum(dtype=np.int64)), max(0, len(pair.doc_idx) - 1)
        rows.append({"prefix": _prefix(pair), "rows": len(pair), "documents": documents, "tokens": tokens})
    total = sum(row["tokens"] for row in rows)
    return [row | {"share": row["tokens"] / total if total else 0.0} for row in rows]


def plan_mixture(
    prefixes: Sequence[str], total: int, temperature: float = 1.0, weights: Sequence[float] | None = None
) -> list[dict[str, Any]]:
    """Return the tokens that a run takes from each source.

    Args:
        prefixes: prefixes of pairs of files.
        total: number of tokens of the run.
        temperature, weights: as those of `mixture_shares`.

    Returns:
        Rows of `count_tokens` with `taken` (tokens of the run; they sum to `total`), `taken_share` and `epochs` (passes
        over the source).

    Raises:
        ArgumentError, DataError: as `mixture_shares` and `count_tokens`, or the total is below 1.
    """
    if total < 1:
        raise ArgumentError(f"a run of {total} tokens: pass at least 1")
    rows = count_tokens(prefixes)
    shares = mixture_shares([row["tokens"] for row in rows], temperature, weights)
    bounds = [min(total, round(total * part)) for part in np.cumsum(shares).tolist()[:-1]] + [total]
    taken = [end - begin for begin, end in zip([0, *bounds[:-1]], bounds, strict=True)]
    return [
        row | {"taken": count, "taken_share": share, "epochs": count / row["tokens"] if row["tokens"] else 0.0}
        for row, count, share in zip(rows, taken, shares, strict=True)
    ]


def plan_packing(prefix: str, budget: int) -> dict[str, Any]:
    """Return the padding of the rows of a pair in rows of a token budget, one by one and packed.

    Returns:
        `rows`, `tokens`, `budget`, `empty` and `over_budget` (rows that are left out), `packs`, and the shares of
        padding: `padding_unpacked` (one row in each) and `padding_packed`.

    Raises:
        ArgumentError: the budget is below 1.
        DataError: a file is missing or damaged, or no row fits into the budget.
    """
    if budget < 1:
        raise ArgumentError(f"budget {budget} must be at least 1")
    pair = open_pair(prefix)
    fits = (pair.sizes > 0) & (pair.sizes <= budget)
    sizes = pair.sizes[fits]
    if not sizes.size:
        raise DataError(f"no row of {_prefix(pair)} has 1 to {budget} tokens")
    packs = pack(sizes, budget)
    tokens = int(sizes.sum(dtype=np.int64))
    return {
        "prefix": _prefix(pair),
        "rows": len(pair),
        "tokens": tokens,
        "budget": budget,
        "empty": int((pair.sizes == 0).sum()),
        "over_budget": int((pair.sizes > budget).sum()),
        "packs": len(packs),
        "padding_unpacked": 1 - tokens / (sizes.size * budget),
        "padding_packed": packs.padding_share,
    }
