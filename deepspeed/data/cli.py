"""Command `ds_data`: look into token files and analyses, count tokens, plan mixtures and packing."""

from __future__ import annotations

import argparse
import contextlib
import decimal
import json
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from deepspeed.data import summary
from deepspeed.data.analysis_map import SINGLE
from deepspeed.errors import ArgumentError, DataError, DeepSpeedError, NotAvailableError

_BAR = 40  # characters of the longest bar
_FACTORS = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_LOG_SCALE = 50  # a larger ratio of largest to smallest value is drawn on a logarithmic axis
_MANY_EPOCHS = 4  # repeated data is worth almost as much as new data up to here (arXiv:2305.16264)


def main(arguments: list[str] | None = None) -> int:
    """Run `ds_data`.

    Args:
        arguments: command line without the program's name; None: `sys.argv`.

    Returns:
        Exit code: 0, or 1 after an error.
    """
    options = _parser().parse_args(arguments)
    try:
        figures, lines = _COMMANDS[options.command](options)
    except (DeepSpeedError, OSError) as error:
        print(f"ds_data: {error}", file=sys.stderr)
        return 1
    print(json.dumps(figures, indent=1) if options.json else "\n".join(lines))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("ds_data", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    look = commands.add_parser("look", help="rows, documents, dtype and lengths of a pair; metrics of an analysis")
    look.add_argument("prefix", help="prefix of a pair of files, or the folder of an analysis")
    look.add_argument("--picture", metavar="FILE", help="also draw the distribution (needs matplotlib)")
    count = commands.add_parser("count", help="tokens of each source")
    mixture = commands.add_parser("mixture", help="tokens and epochs that a mixture takes from each source")
    for command in (count, mixture):
        command.add_argument("prefix", nargs="+", help="prefixes of pairs of files")
    share = mixture.add_mutually_exclusive_group()
    share.add_argument("--temperature", type=float, default=1.0, help="shares as tokens ** (1 / T); default 1")
    share.add_argument("--weights", type=float, nargs="+", help="shares up to a factor, one for each source")
    mixture.add_argument("--tokens", required=True, help="tokens of the run: 300000000, 3e8, 300M")
    length = commands.add_parser("length", help="padding of rows of a token budget, packed and not")
    length.add_argument("prefix", help="prefix of a pair of files")
    length.add_argument("--budget", type=int, required=True, help="tokens of a row")
    for command in (look, count, mixture, length):
        command.add_argument("--json", action="store_true", help="one JSON value instead of lines")
    return parser


def _look(options: argparse.Namespace) -> tuple[Any, list[str]]:
    if os.path.isdir(options.prefix):
        figures = summary.describe_analysis(options.prefix)
        lines = [line for name, row in figures["metrics"].items() for line in _metric_lines(name, row)]
    else:
        figures = summary.describe_pair(options.prefix)
        lines = _pair_lines(figures)
    if options.picture is not None:
        draw(figures, options.picture)
    return figures, lines


def _pair_lines(figures: dict[str, Any]) -> list[str]:
    dialect = "" if figures["dialect"] == "both" else f" (dtype code of {figures['dialect']})"
    lines = [
        f"{figures['prefix']}: {figures['rows']:,} rows, {figures['documents']:,} documents, "
        f"{figures['tokens']:,} tokens, {figures['dtype']}{dialect}, {_size(sum(figures['bytes'].values()))}"
    ]
    lengths = figures["lengths"]
    if lengths["max"] is not None:
        lines.append(f"lengths: {_spread(lengths)}")
        top = max(row["count"] for row in figures["histogram"])
        width = len(f"{figures['histogram'][-1]['to']:,}")
        for row in figures["histogram"]:
            bar = "#" * (-(-row["count"] * _BAR // top))
            lines.append(f"{row['from']:>{width},} to {row['to']:>{width},} {row['count']:>12,} {bar}".rstrip())
    return lines


def _spread(values: dict[str, Any]) -> str:
    return f"min {values['min']:,}, median {values['median']:,g}, mean {values['mean']:,.1f}, max {values['max']:,}"


def _size(count: int) -> str:
    return next(f"{count / 2**shift:,.1f} {unit}" for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "B"))
                if count >= 2**shift or not shift)  # fmt: skip


def _metric_lines(name: str, row: dict[str, Any]) -> list[str]:
    if row["type"] != SINGLE:
        largest = ", ".join(f"{value:,} at {index:,}" for index, value in row["largest"])
        return [f"{name}: sum of {row['elements']:,} elements, {row['sum']:,} in all", f"  largest: {largest}"]
    lines = [
        f"{name}: {row['samples']:,} samples, {row['distinct']:,} distinct values, "
        f"{row['percentile_rows']:,} rows of percentiles",
        f"  values: {_spread(row['values'])}",
    ]
    for end in ("lowest", "highest"):
        lines.append(f"  {end}: " + ", ".join(f"sample {sample:,} = {value:,}" for sample, value in row[end]))
    return lines


def draw(figures: dict[str, Any], path: str) -> None:
    """Draw the lengths of a pair of files, or the value of each percentile of the metrics of an analysis.

    Args:
        figures: of `summary.describe_pair` or `summary.describe_analysis`.
        path: file of the picture; the suffix determines the format.

    Raises:
        NotAvailableError: matplotlib is not installed.
        ArgumentError: matplotlib does not know the format.
        DataError: there is nothing to draw.
    """
    if find_spec("matplotlib") is None:
        raise NotAvailableError("--picture needs matplotlib: pip install 'deepspeed[plot]'")
    panels = summary.curves(figures)
    if not panels:
        raise DataError("there is nothing to draw: no rows, and no metric with one value per sample")
    figure = import_module("matplotlib.figure").Figure(figsize=(7, 3 * len(panels)), layout="constrained")
    for position, (name, curve) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(len(panels), 1, position)
        axes.plot(range(len(curve)), curve, color="#1f6fbf")
        axes.set(title=name, xlabel="percentile", xlim=(0, 100))
        if curve[0] > 0 and curve[-1] > _LOG_SCALE * curve[0]:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=min(0, *curve))
        axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise ArgumentError(f"--picture {path}: {error}") from error


def _count(options: argparse.Namespace) -> tuple[Any, list[str]]:
    rows = summary.count_tokens(options.prefix)
    total = {name: sum(row[name] for row in rows) for name in ("rows", "documents", "tokens")}
    table = [["source", "rows", "documents", "tokens", "share"]]
    table += [[row["prefix"], *(f"{row[name]:,}" for name in total), f"{row['share']:.2%}"] for row in rows]
    table.append(["all", *(f"{value:,}" for value in total.values()), ""])
    return {"sources": rows, "all": total}, _columns(table)


def _mixture(options: argparse.Namespace) -> tuple[Any, list[str]]:
    total = _number(options.tokens)
    rows = summary.plan_mixture(options.prefix, total, options.temperature, options.weights)
    table = [["source", "tokens", "share", "taken", "epochs"]]
    for row in rows:
        epochs = f"{row['epochs']:.3f}"
        table.append([row["prefix"], f"{row['tokens']:,}", f"{row['taken_share']:.2%}", f"{row['taken']:,}", epochs])
    table.append(["all", f"{sum(row['tokens'] for row in rows):,}", "", f"{total:,}", ""])
    repeated = [row["prefix"] for row in rows if row["epochs"] > _MANY_EPOCHS]
    note = [f"more than {_MANY_EPOCHS} epochs, which help less: {', '.join(repeated)}"] if repeated else []
    return {"tokens": total, "sources": rows}, _columns(table) + note


def _number(text: str) -> int:
    """Return a whole number such as 1000, 1_000, 1e9, 1.5B.

    Raises:
        ArgumentError: it is none.
    """
    suffix = text[-1:].upper()
    with contextlib.suppress(decimal.DecimalException):
        value = decimal.Decimal(text[:-1] if suffix in _FACTORS else text) * _FACTORS.get(suffix, 1)
        if abs(value) < 2**63 and value == value.to_integral_value():
            return int(value)
    raise ArgumentError(f"--tokens {text}: pass a whole number, such as 300000000, 3e8 or 300M")


def _length(options: argparse.Namespace) -> tuple[Any, list[str]]:
    row = summary.plan_packing(options.prefix, options.budget)
    used = row["rows"] - row["empty"] - row["over_budget"]
    lines = [
        f"{row['prefix']}: {used:,} rows, {row['tokens']:,} tokens, in rows of {row['budget']:,} tokens",
        f"one by one: {used:,} rows, {row['padding_unpacked']:.2%} padding",
        f"packed: {row['packs']:,} rows, {row['padding_packed']:.2%} padding",
    ]
    if row["empty"] or row["over_budget"]:
        lines.append(f"left out: {row['over_budget']:,} longer rows, {row['empty']:,} empty ones")
    return row, lines


def _columns(table: list[list[str]]) -> list[str]:
    """Return the lines of a table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.ljust(width) if not place else cell.rjust(width) for place, (cell, width) in enumerate(cells))
        .rstrip()
        for row in table
        for cells in [list(zip(row, widths, strict=True))]
    ]  # fmt: skip


_COMMANDS = {"look": _look, "count": _count, "mixture": _mixture, "length": _length}


if __name__ == "__main__":
    sys.exit(main())
