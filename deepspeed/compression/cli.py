"""Command `ds_compress`: list the removable units of a model, or compare an exported folder with its original."""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed.compression.compare import report
from deepspeed.compression.pruning.pruning_plan import PruningPlan
from deepspeed.compression.pruning.transformers_groups import Shrink, expert_shrinks, on_meta, shapes_of
from deepspeed.compression.pruning.verify import layers_of, with_layers
from deepspeed.errors import CompressionError, DeepSpeedError
from deepspeed.foundation.transformers_model import block_lists

_MIB = 2**20
KINDS = ["ffn", "heads", "experts", "layers"]


def main(arguments: list[str] | None = None) -> int:
    """Run `ds_compress`.

    Args:
        arguments: command line without the program's name; None: `sys.argv`.

    Returns:
        Exit code: 0, or 1 after an error.
    """
    parser = argparse.ArgumentParser("ds_compress", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="units, coupled tensors, parameters, bytes and FLOPs of what can go")
    plan.add_argument("model", help="a folder with config.json, or the file; the weights are not read")
    plan.add_argument("--ratio", type=float, default=0.5, help="share of units kept")
    plan.add_argument("--kinds", nargs="+", choices=KINDS, help="default: all that it has")
    plan.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    compare = commands.add_parser("report", help="bytes, parameters, loss and speed of an exported folder")
    compare.add_argument("before", help="folder of the dense model")
    compare.add_argument("after", help="the exported folder")
    compare.add_argument("--tokens", help="held-out tokens: a tensor of shape (windows, length) by torch.save")
    compare.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    options = parser.parse_args(arguments)
    try:
        if options.command == "report":
            figures = report(
                options.before, options.after, None if options.tokens is None else load_windows(options.tokens)
            )
            print(json.dumps(figures, indent=1) if options.json else _format_report(figures))
        else:
            rows = plan_rows(*load_model(options.model), options.kinds, options.ratio)
            print(json.dumps(rows, indent=1) if options.json else "\n".join(map(_format_row, rows)))
    except DeepSpeedError as error:
        print(f"ds_compress: {error}", file=sys.stderr)
        return 1
    return 0


def load_windows(path: str) -> torch.Tensor:
    """Load held-out tokens: an integer tensor [windows, length] from a file of `torch.save`.

    Raises:
        CompressionError: the file has something else, or windows of fewer than two tokens.
    """
    try:
        windows = torch.load(path, weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise CompressionError(f"--tokens {path} is no tensor of torch.save: {error}") from error
    if not isinstance(windows, torch.Tensor) or windows.dim() != 2 or windows.is_floating_point():
        raise CompressionError(f"--tokens {path}: integers of shape (windows, length) are asked for")
    if windows.shape[1] < 2:
        raise CompressionError(f"--tokens {path}: windows of one token predict nothing")
    return windows


def load_model(path: str) -> tuple[nn.Module, Any]:
    """Return a Transformers model on the meta device and its config, for a folder or the path of a config file.

    Raises:
        CompressionError: the file does not exist, or the model cannot be built.
    """
    import transformers

    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise CompressionError(f"{path} is no folder with a config.json")
    config = transformers.AutoConfig.from_pretrained(str(file.parent if file.name == "config.json" else file))
    names = getattr(config, "architectures", None) or []
    model_class: Any = getattr(transformers, names[0], None) if names else None
    if model_class is None:
        model_class = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    return on_meta(model_class, config), config


def plan_rows(model: nn.Module, config: Any, kinds: list[str] | None, ratio: float) -> list[dict[str, Any]]:
    """Return the savings by removal of each kind of unit.

    Args:
        model: on the meta device.
        config: its Transformers config.
        kinds: some of `KINDS`; None: all, but `experts` only if the model has a number of experts.
        ratio: fraction of units kept.

    Returns:
        A row with the model's size, then rows with `kind`, the units, `parameters_gone`, `bytes_gone_fp32` and
        `flops_gone_per_token`; or with `kind` and the reason `refused`.
    """
    total = sum(shape.numel() for shape in shapes_of(model).values())
    rows: list[dict[str, Any]] = [{"model": type(model).__name__, "parameters": total, "bytes_fp32": 4 * total}]
    plan = PruningPlan(model)
    for kind in kinds or [kind for kind in KINDS if kind != "experts" or _has_experts(model, config)]:
        started = time.perf_counter()
        if kind == "layers":
            kind_rows = [_layers_row(model, config, ratio, total)]
        else:
            kind_rows = [_units_row(model, plan, shrink, ratio) for shrink in plan.shrinks(kind)]
            kind_rows = kind_rows or [{"kind": kind, "refused": plan.refused[kind]}]
        for row in kind_rows:
            if "after" in row:
                gone = total - row["after"]
                work = row.pop("work", gone)  # the number of experts per token does not change
                row |= {"parameters_gone": gone, "bytes_gone_fp32": 4 * gone, "flops_gone_per_token": 2 * work}
            row["seconds"] = round(time.perf_counter() - started, 1)
        rows += kind_rows
    return rows


def _has_experts(model: nn.Module, config: Any) -> bool:
    """Return whether a model has experts, also if their number cannot be reduced, which gives a row with the reason."""
    try:
        return bool(expert_shrinks(model, config))
    except CompressionError:
        return True


def _units_row(model: nn.Module, plan: PruningPlan, shrink: Shrink, ratio: float) -> dict[str, Any]:
    family = shrink.families[0]
    kept_units, of = shrink.kept_per_block(ratio), family.size // family.blocks
    try:
        plan.check_said(family, kept_units)
        small = on_meta(type(model), shrink.config(plan.config, kept_units, of))
    except CompressionError as error:
        return {"kind": shrink.kind, "refused": str(error)}
    names = shrink.names()
    rows, left = shapes_of(model), shapes_of(small)
    routers = [rows[name].numel() - left[name].numel() for name in names if len(rows[name]) == 2]
    return {
        "kind": shrink.kind,
        "config": {key: shrink.config(plan.config, kept_units, of).to_dict().get(key) for key in shrink.unit},
        "units": f"{kept_units} of {of} in each of {len(shrink.families)} layers",
        "coupled_tensors": len(names),
        "first_layer": family.names(),
        **({"work": sum(routers)} if shrink.kind == "experts" else {}),
        "proof": plan.distances.get(shrink.kind),
        "after": sum(shape.numel() for shape in shapes_of(small).values()),
    }


def _layers_row(model: nn.Module, config: Any, ratio: float, total: int) -> dict[str, Any]:
    try:
        count = layers_of(config)
        kept_layers = max(1, round(count * ratio))
        small = on_meta(type(model), with_layers(config, list(range(kept_layers))))
    except CompressionError as error:
        return {"kind": "layers", "refused": str(error)}
    after = sum(shape.numel() for shape in shapes_of(small).values())
    if after >= total:
        return {"kind": "layers", "refused": f"{type(config).__name__} with {kept_layers} layers is not smaller"}
    lists = list(block_lists(model))
    return {"kind": "layers", "units": f"{kept_layers} of {count} layers", "lists": lists, "after": after}


def _format_report(figures: dict[str, Any]) -> str:
    lines = [f"{'':12} {'before':>15} {'after':>15} {'after / before':>15}"]
    for name in ("parameters", "bytes", "loss"):
        if name in figures:
            old, new = figures[name]
            form = ",.4f" if name == "loss" else ",d"
            lines.append(f"{name:12} {format(old, form):>15} {format(new, form):>15} {new / old:15.4f}")
    for name in ("prefill", "token"):
        lines.append(f"{name:12} {figures[name]:.2f} x as fast, CPU time of one thread")
    return "\n".join(lines)


def _format_row(row: dict[str, Any]) -> str:
    if "model" in row:
        return f"{row['model']}: {row['parameters']:,} parameters, {row['bytes_fp32'] / _MIB:,.1f} MiB in fp32"
    if "refused" in row:
        return f"{row['kind']:7} refused: {row['refused']}"
    held = "they change places on a twin" if row["kind"] == "experts" else "removed is masked on a twin"
    proof = f", {held} (difference {row['proof']:.1e})" if row.get("proof") is not None else ""
    coupled = f" in {row['coupled_tensors']} coupled tensors" if "coupled_tensors" in row else ""
    return (
        f"{row['kind']:7} {row['units']}{coupled}: {row['parameters_gone']:,} parameters, "
        f"{row['bytes_gone_fp32'] / _MIB:,.1f} MiB in fp32, {row['flops_gone_per_token']:,} FLOPs per token go{proof}"
    )


if __name__ == "__main__":
    sys.exit(main())
