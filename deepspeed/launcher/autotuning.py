"""`deepspeed --autotuning`: replaces this process by the planner's autotuner."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from deepspeed.launcher.hosts import Hosts

_FLAG = "--autotuning"


def hand_over(options: argparse.Namespace, given: Sequence[str], hosts: Hosts) -> None:
    """Never returns.

    Args:
        options: of the command.
        given: the words that they were read from.
        hosts: that the job uses.
    """
    words = own_options(given[: len(given) - len(options.user_args) - 1])
    module = str(int(options.module))
    told = [options.autotuning, json.dumps(hosts), json.dumps(words), module, options.user_script, *options.user_args]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "deepspeed.planner.autotuner", *told])


def own_options(words: Sequence[str]) -> list[str]:
    """The launcher's options without --autotuning."""
    kept, skip = list[str](), False
    for word in words:
        if skip or word == _FLAG:
            skip = word == _FLAG and not skip
        elif not word.startswith(f"{_FLAG}="):
            kept.append(word)
    return kept
