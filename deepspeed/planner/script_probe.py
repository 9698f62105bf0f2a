"""Run a script up to its first forward and predict its plans (`python -m deepspeed.planner.script_probe FOLDER`).

The script runs as rank 0 of a simulated world, in a separate process. `deepspeed.initialize` is intercepted to obtain
the model, the optimizer and the configuration; the engine's first forward provides the micro-batch and ends the script.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import pickle
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

import deepspeed
from deepspeed.config.load import load_raw
from deepspeed.engine import initialize as room
from deepspeed.errors import ArgumentError
from deepspeed.foundation.pytree import map_tensors, tensors_in
from deepspeed.planner.fake_world import simulated_world
from deepspeed.planner.search import Task, TrainingPlan, search
from deepspeed.planner.train_program import ForwardArguments
from deepspeed.simulator.machine import Machine

JOB, PLANS, INFO = "probe.json", "plans.pickle", "model_info.json"


@dataclass
class Heard:
    """Arguments of a script's call of `deepspeed.initialize` and of its first forward.

    Args:
        model: copy of the model before the call.
        config: the configuration.
        optimizer: a callable that creates an optimizer from parameters; None: the configured one.
        args, kwargs: arguments of the first forward.
    """

    model: nn.Module
    config: dict[str, Any]
    optimizer: Callable[..., Any] | None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None


class _EndScript(BaseException):
    """Exception that ends the script; `except Exception` does not catch it."""


def listen(run: Callable[[], object], ranks: int) -> Heard:
    """Run a script by calling `run`, in a simulated world of `ranks` ranks, until its engine's first forward.

    Raises:
        ArgumentError: the script ends before its engine's first forward.
    """
    heard: list[Heard] = []
    usual = room.initialize

    def over(_engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        heard[0].args, heard[0].kwargs = args, kwargs
        raise _EndScript

    def hearing(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(("args", "model", "optimizer"), args, strict=False)) | kwargs
        if not heard:
            config = arguments.get("config") or arguments.get("config_params") or getattr(
                arguments.get("args"), "deepspeed_config", None
            )  # fmt: skip
            model, optimizer = copy.deepcopy(arguments.get("model")), arguments.get("optimizer")
            if isinstance(optimizer, torch.optim.Optimizer):  # create new ones of the same class and defaults
                optimizer = functools.partial(cast(Any, type(optimizer)), **optimizer.defaults)
            make = optimizer if callable(optimizer) else None
            heard.append(Heard(cast(nn.Module, model), dict(load_raw(config)), make))
        engine_and_others = usual(*args, **kwargs)
        engine_and_others[0].register_forward_pre_hook(over, with_kwargs=True)
        return engine_and_others

    anywhere: Any = deepspeed
    anywhere.initialize = room.initialize = hearing
    try:
        with simulated_world(0, ranks):
            run()
    except _EndScript:
        return heard[0]
    except SystemExit as end:
        raise ArgumentError(f"the script ended with {end.code!r} before its engine's first forward") from None
    finally:
        anywhere.initialize = room.initialize = usual
    raise ArgumentError("the script ended before its engine's first forward")


def batches(heard: Heard, rows: int) -> Callable[[int], Any]:
    """Return a function that creates micro-batches of any size by repeating the script's `rows` samples.

    Raises:
        ArgumentError: no tensor of the first micro-batch has `rows` rows.
    """
    whole = ForwardArguments(tuple(heard.args), dict(heard.kwargs or {}))
    if not any(tensor.dim() and len(tensor) == rows for tensor in tensors_in(whole)):
        raise ArgumentError(
            f"the script's first micro-batch has no tensor with {rows} samples, as its JSON says: does it take another "
            "size from a flag of its own? name that flag in autotuning.arg_mappings"
        )

    def batch(count: int) -> Any:
        picked = torch.arange(count) % rows

        def of(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[picked] if tensor.dim() and len(tensor) == rows else tensor

        return map_tensors(of, whole)

    return batch


def main() -> int:
    """Predict the plans of the job in the folder `sys.argv[1]` and write them there; returns 0."""
    folder = Path(sys.argv[1]).absolute()
    job: dict[str, Any] = json.loads((folder / JOB).read_text())
    machine = Machine.load(job["machine"])
    # Variables as the launcher sets them, except the address: a simulated world has none.
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(machine.ranks), "LOCAL_WORLD_SIZE": "1"}
    sys.argv = [job["script"], *job["arguments"]]
    sys.path[0] = str(Path(job["script"]).resolve().parent)
    run = runpy.run_module if job["module"] else runpy.run_path
    heard = listen(lambda: run(job["script"], run_name="__main__"), machine.ranks)
    parameters = list(heard.model.parameters())
    count, trained = sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
    task = Task(heard.model, batches(heard, job["micro"]), job["train_batch"], heard.config, None, heard.optimizer)
    limits = job["limits"]
    judged = search(task, machine, job["seconds"], allowed=lambda plan: is_allowed(plan, limits), axes=True)
    (folder / PLANS).write_bytes(pickle.dumps(judged))
    facts = {"num_params": count, "trainable_num_params": trained, "rank": 0}
    known = [each for each in judged if each.memory is not None and not each.plan.recompute]
    smallest = min(known, key=lambda each: each.plan.micro, default=None)
    memory = None if smallest is None else smallest.memory
    facts["activation_mem_per_gpu"] = 0 if memory is None else memory.at_peak.get("activations", 0)
    (folder / INFO).write_text(json.dumps(facts, indent=2) + "\n")
    return 0


def is_allowed(plan: TrainingPlan, limits: dict[str, Any]) -> bool:
    """Return whether a plan is within the user's limits and has no pipeline stages, which a script's loop cannot run.

    Args:
        plan: the plan.
        limits: `stages`, the ZeRO stages; `least` and `most`, the bounds of the micro-batch size; `micros`, the
            micro-batch sizes, or None for all.
    """
    micros = limits["micros"]
    sized = limits["least"] <= plan.micro <= limits["most"] and (micros is None or plan.micro in micros)
    return sized and plan.stage in limits["stages"] and plan.shape.stages == 1


if __name__ == "__main__":
    sys.exit(main())
