"""Small files beside a checkpoint for readers that know upstream's names, and the script dropped beside the tags."""

from __future__ import annotations

import io
from typing import Any

import torch

from deepspeed.foundation.log import say_once
from deepspeed.version import __version__

_SCRIPT = '''#!/usr/bin/env python
"""Writes the fp32 weights of the checkpoints beside this file: python zero_to_fp32.py . OUTPUT_DIR."""

from deepspeed.utils.zero_to_fp32 import main

if __name__ == "__main__":
    main()
'''
SCRIPTS = {"zero_to_fp32.py": _SCRIPT.encode()}


def upstream_names(client_state: dict[str, Any], about: dict[str, Any], counters: dict[str, int]) -> dict[str, bytes]:
    """Files under upstream's names: the client's state and the counters, without weights.

    `torch.load(weights_only=True)` opens them. A client's converter takes the weights through `zero_to_fp32` and the
    rest from here.

    Args:
        client_state: what the client saves; values that such a file may not hold are left out.
        about: of the manifest.
        counters: of the engine.
    """
    stage = about["stage"]
    shared = {
        "ds_version": __version__,
        "dp_world_size": about["ranks"],
        "mp_world_size": 1,
        "skipped_steps": counters["skipped_steps"],
        "global_steps": counters["global_steps"],
        "global_samples": counters["global_samples"],
    }
    kept = {key: value for key, value in client_state.items() if key not in shared}
    model = {**shared, **plain(kept)}
    optimizer = {"optimizer_state_dict": {"zero_stage": stage, "partition_count": 1}, "ds_version": __version__}
    first = "zero_pp_rank_0_mp_rank_00" if stage == 3 else "mp_rank_00"
    prefix = "bf16_" if about["precision"] == "bfloat16" else ""  # of upstream's optimizer files alone
    return {
        f"{first}_model_states.pt": _saved(model),
        f"{prefix}zero_pp_rank_0_mp_rank_00_optim_states.pt": _saved(optimizer),
    }


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """The entries that `torch.load(weights_only=True)` accepts."""
    made = {}
    for key, value in state.items():
        try:
            torch.load(io.BytesIO(_saved({key: value})), weights_only=True)
            made[key] = value
        except Exception as error:  # whatever pickling or the restricted unpickler has against it
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            say_once(f"client_state[{key!r}] is not in the files under upstream's names: {reason[:120]}")
    return made
