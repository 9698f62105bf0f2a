"""Command `ds_config` (`python -m deepspeed.config`): explains a configuration, or writes the reference of all keys."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from deepspeed.config.auto import Facts
from deepspeed.config.config import DeepSpeedConfig
from deepspeed.config.docs import as_text, reference
from deepspeed.config.schema import all_keys
from deepspeed.errors import DeepSpeedError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `ds_config`.

    Args:
        arguments: command line without the program's name; None: the process's command line.

    Returns:
        The exit status: 0, or 1 if the configuration has problems.
    """
    parser = argparse.ArgumentParser(prog="ds_config", description="Explain a configuration, or write the reference.")
    commands = parser.add_subparsers(dest="command", required=True)
    explain = commands.add_parser("explain", help="print every resolved value with its origin")
    explain.add_argument("file", help="a JSON or HJSON file, or base64 of JSON")
    explain.add_argument("--world", type=int, default=1, help="data-parallel ranks (default 1)")
    explain.add_argument("--all", action="store_true", help="also keys that are not available yet")
    facts = explain.add_argument_group('what "auto" is resolved from')
    facts.add_argument("--hidden-size", type=int, help="width of the model")
    facts.add_argument("--loader-batch-size", type=int, help="samples per micro-batch of the loader")
    facts.add_argument("--num-train-steps", type=int, help="optimizer steps of the run")
    facts.add_argument("--device", choices=["cpu", "cuda"], help="where it will run")
    facts.add_argument(
        "--bf16-fast", action=argparse.BooleanOptionalAction, help="whether the device computes bf16 faster than fp32"
    )
    write = commands.add_parser("reference", help="write the configuration reference")
    write.add_argument("path", nargs="?", default="docs/configuration.md")
    options = parser.parse_args(arguments)
    if options.command == "reference":
        Path(options.path).write_text(reference(), encoding="utf-8")
        return 0
    facts = Facts(
        hidden_size=options.hidden_size,
        loader_batch_size=options.loader_batch_size,
        num_train_steps=options.num_train_steps,
        device=options.device,
        bf16_fast=options.bf16_fast,
    )
    try:
        config = DeepSpeedConfig(options.file, world=options.world, facts=facts)
        rows = config.explain()
        if config.optimizer is not None and config.optimizer.type:
            _try_optimizer(config)
    except DeepSpeedError as error:
        print(error, file=sys.stderr)
        return 1
    absent = {key.path for key in all_keys() if key.note.status == "not available yet"}
    hidden = [row for row in rows if row.origin == "default" and row.path in absent]
    print(as_text(rows if options.all else [row for row in rows if row not in hidden]))
    if not options.all:
        print(f"{len(hidden)} keys that are not available yet stand at their defaults; --all shows them")
    for problem in _missing_packages(config):
        print(f"on this machine, initialize refuses: {problem}")
    return 0


def _try_optimizer(config: DeepSpeedConfig) -> None:
    """Check the arguments of the JSON's optimizer: create an optimizer like `initialize`, over one small matrix."""
    import torch

    from deepspeed.optim.build import build_configured

    build_configured(config, [torch.nn.Parameter(torch.zeros(2, 2))])


def _missing_packages(config: DeepSpeedConfig) -> list[str]:
    from deepspeed.monitor.monitor import missing_packages

    return missing_packages(config.monitor_config) if config.monitor_config.enabled else []


if __name__ == "__main__":
    sys.exit(main())
