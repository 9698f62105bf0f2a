"""`python -m deepspeed.planner.script_probe FOLDER`: runs a script to its first forward and predicts its plans.

The script runs as rank 0 of a world that is not there, in a process of its own. `deepspeed.initialize` is heard: the
model as it was, the optimizer and the configuration; the engine's first forward gives the micro-batch and ends the
script.
"""

from __future__ import annotations

import copy
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
from deepspeed.planner.search import Judged, Task, TrainingPlan, search
from deepspeed.simulator.machine import Machine

JOB, PLANS, INFO = "probe.json", "plans.pickle", "model_info.json"


@dataclass
class Heard:
    """What a script gave to `deepspeed.initialize` and to its engine.

    Args:
        model: as it was before.
        config: the JSON.
        optimizer: a callable that makes one of parameters, or None.
        args, kwargs: of the first forward.
    """

    model: nn.Module
    config: dict[str, Any]
    optimizer: Callable[..., Any] | None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None


class _EndScript(BaseException):
    """Ends the script; no `except Exception` of its own takes it."""


def listen(run: Callable[[], object], ranks: int) -> Heard:
    """Run a script up to its first forward.

    Args:
        run: runs it.
        ranks: of the world that it is to see.

    Raises:
        ArgumentError: it ends before.
    """
    heard: list[Heard] = []
    usual = room.initialize

    def over(_engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        heard[0].args, heard[0].kwargs = args, kwargs
        raise _EndScript

    def hearing(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(("args", "model", "optimizer"), args, strict=False)) | kwargs
        if not heard:
            config = given.get("config") or given.get("config_params") or getattr(
                given.get("args"), "deepspeed_config", None
            )  # fmt: skip
            model = copy.deepcopy(given.get("model"))
            heard.append(Heard(cast(nn.Module, model), dict(load_raw(config)), _maker(given.get("optimizer"))))
        made = usual(*args, **kwargs)
        made[0].register_forward_pre_hook(over, with_kwargs=True)
        return made

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


def _maker(optimizer: Any) -> Callable[..., Any] | None:
    """Makes another optimizer like a client's."""
    if isinstance(optimizer, torch.optim.Optimizer):
        kind, settings = cast(Any, type(optimizer)), dict(optimizer.defaults)
        return lambda parameters: kind(parameters, **settings)
    return optimizer if callable(optimizer) else None


def batches(heard: Heard, rows: int) -> Callable[[int], Any]:
    """Makes micro-batches of other sizes of the one that was heard: its samples again and again.

    Args:
        heard: of the script.
        rows: samples of it.

    Raises:
        ArgumentError: no tensor has so many.
    """
    given = {**(heard.kwargs or {})}
    whole: Any = given if not heard.args else list(heard.args)
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
    """Predict what the job in the folder asks for; its plans lie there afterwards."""
    folder = Path(sys.argv[1]).absolute()
    job: dict[str, Any] = json.loads((folder / JOB).read_text())
    machine = Machine.load(job["machine"])
    # As the launcher starts a rank, but for the address: this world has none.
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
    facts["activation_mem_per_gpu"] = _activations(judged)
    (folder / INFO).write_text(json.dumps(facts, indent=2) + "\n")
    return 0


def is_allowed(plan: TrainingPlan, limits: dict[str, Any]) -> bool:
    """Whether a plan is among those that the user wants, and that the script can run: it calls forward, backward and
    step itself, which stages of a pipeline do not have.

    Args:
        plan: of them all.
        limits: `stages`, `least`, `most` of the micro-batch, `micros` (None: any).
    """
    micros = limits["micros"]
    sized = limits["least"] <= plan.micro <= limits["most"] and (micros is None or plan.micro in micros)
    return sized and plan.stage in limits["stages"] and plan.shape.stages == 1


def _activations(judged: list[Judged]) -> int:
    """Bytes of the smallest micro-batch without recompute."""
    known = [each for each in judged if each.memory is not None and not each.plan.recompute]
    least = min(known, key=lambda each: each.plan.micro, default=None)
    return least.memory.at_peak.get("activations", 0) if least is not None and least.memory is not None else 0


if __name__ == "__main__":
    sys.exit(main())
