"""Compares the files that upstream's data analyzer writes with ours, byte by byte; run by hand.

    UPSTREAM/bin/python tests/upstream/compare_analysis.py write THEIRS
    python tests/upstream/compare_analysis.py write OURS
    python tests/upstream/compare_analysis.py compare OURS THEIRS

The first line runs in an environment that has upstream. `compare` prints, for each kind of batches, how many files are
equal and which are not. Upstream's are wrong for dicts without `index` and tuples (unless a batch has as many fields as
samples) and for `sample_indices` beyond the number of samples; with more processes than samples it fails.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

BATCH = 8
SIZES, DISTINCT = (7, 100, 256, 257, 1000), (2, 20, 300, 5000)
PROCESSES = ((1, 1), (2, 1), (1, 2), (3, 2), (4, 3))  # workers, threads of each
KINDS = ("dict", "tuple", "index", "permuted", "permutation", "beyond")


def tokens_of(batch: Any) -> torch.Tensor:
    return batch["x"] if isinstance(batch, dict) else batch[0] if isinstance(batch, (tuple, list)) else batch


def values(batch: Any) -> torch.Tensor:
    return tokens_of(batch).sum(1)


def counts(batch: Any) -> torch.Tensor:
    return torch.bincount(tokens_of(batch).flatten(), minlength=5000)


def cases() -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    """Name, dataset and arguments."""
    table = itertools.product(("tensor",), SIZES, DISTINCT, PROCESSES)
    for kind, samples, distinct, (workers, threads) in [*table, *((kind, 100, 20, (2, 2)) for kind in KINDS)]:
        draw = np.random.default_rng(samples + distinct)
        rows = [torch.tensor([int(value), 1]) for value in draw.integers(0, distinct, samples)]
        ids = draw.permutation(samples) if kind == "permuted" else np.arange(samples)
        arguments: dict[str, Any] = {"num_workers": workers, "num_threads": threads}
        if kind == "permutation":
            arguments["sample_indices"] = draw.permutation(samples).tolist()
        if kind == "beyond":
            arguments["sample_indices"] = [3 * position for position in range(samples)]
        datasets: dict[str, list[Any]] = {
            "dict": [{"x": row} for row in rows],
            "tuple": [(row, row) for row in rows],
            "index": [{"x": row, "index": torch.tensor([int(id_)])} for row, id_ in zip(rows, ids, strict=True)],
        }
        name = f"{kind}-{samples}-{distinct}-{workers}x{threads}"
        yield name, datasets.get("index" if kind == "permuted" else kind, rows), arguments


def write(folder: Path) -> None:
    from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer

    for name, dataset, arguments in cases():
        arguments |= {"batch_size": BATCH, "metric_names": ["a", "c"], "metric_functions": [values, counts]}
        arguments |= {"metric_types": ["single_value_per_sample", "accumulate_value_over_samples"]}
        arguments |= {"metric_dtypes": [torch.long, torch.long], "save_path": str(folder / name)}
        (folder / name).mkdir(parents=True)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                for worker in range(arguments["num_workers"]):
                    DataAnalyzer(dataset, worker_id=worker, **arguments).run_map()
                DataAnalyzer(dataset, **arguments).run_reduce()
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:120]}", file=sys.stderr)


def compare(ours: Path, theirs: Path) -> None:
    equal: Counter[str] = Counter()
    for name, *_ in cases():
        for file in sorted((ours / name).glob("*/*")):
            other = theirs / file.relative_to(ours)
            if not other.exists():
                print(f"{file.relative_to(ours)}: only in {ours}")
            elif other.read_bytes() == file.read_bytes():
                equal[name.partition("-")[0]] += 1
            else:
                print(f"{file.relative_to(ours)} differs")
    print(", ".join(f"{kind}: {count} equal" for kind, count in equal.items()))


if __name__ == "__main__":
    folders = [Path(argument).resolve() for argument in sys.argv[2:]]
    write(*folders) if sys.argv[1] == "write" else compare(*folders)
