"""The small state of a run, beside its tensors: counters, window, loss scale, schedule, data position, randomness."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.engine.dataloader import DeepSpeedDataLoader
from deepspeed.errors import CheckpointError
from deepspeed.foundation.log import say

COUNTERS = ("global_steps", "micro_steps", "global_samples", "skipped_steps")


def capture_run(engine: Any) -> dict[str, Any]:
    """The state that all ranks share.

    Args:
        engine: the engine.
    """
    optimizer, loader = engine._components.optimizer, engine.training_dataloader
    made: dict[str, Any] = {
        "counters": {name: getattr(engine, name) for name in COUNTERS},
        "window": {"seen": engine._seen, "sums": engine._sums},
        "batch": {"micro": engine._micro, "gas": engine._gas, "ranks": engine.world_size},
        "data": loader.state_dict() if isinstance(loader, DeepSpeedDataLoader) else None,
        "scheduler": engine.lr_scheduler.state_dict() if hasattr(engine.lr_scheduler, "state_dict") else None,
    }
    if engine.compression is not None:
        made["compression"] = engine.compression.state_dict()
    if optimizer is not None:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        scaler = None if optimizer.scaler is None else optimizer.scaler.state_dict()
        made["optimizer"] = {"class": type(optimizer.optimizer).__name__, "groups": groups, "scaler": scaler}
    return made


def capture_private(engine: Any) -> dict[str, Any]:
    """The state that belongs to this rank alone."""
    optimizer, reducer = engine._components.optimizer, engine._components.reducer
    made: dict[str, Any] = {"random": capture_random()}
    if optimizer is not None and reducer is not None and engine._seen + (not reducer.clean):
        counts = (optimizer._items, optimizer._counts_items, optimizer._micro_batches)
        made["window"] = {"counts": counts, "deferred": reducer.deferred}
    return made


def capture_random() -> dict[str, Any]:
    """The states of all random generators of this process."""
    accelerator = get_accelerator()
    made = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if accelerator.device_name() != "cpu":
        made["device"] = accelerator.get_rng_state()
    return made


def restore_random(saved: dict[str, Any]) -> None:
    """Put the random generators back."""
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    if "device" in saved and get_accelerator().device_name() != "cpu":
        get_accelerator().set_rng_state(saved["device"])


def restore_run(engine: Any, saved: dict[str, Any]) -> None:
    """Take back counters and data position; those of the window come with its gradients."""
    for name, value in saved.get("counters", {}).items():
        setattr(engine, name, value)
    loader = engine.training_dataloader
    if saved.get("data") is not None and isinstance(loader, DeepSpeedDataLoader):
        loader.load_state_dict(saved["data"])


def restore_optimizer(engine: Any, saved: dict[str, Any]) -> None:
    """Take back the loss scaler; say so when the optimizer is another one."""
    optimizer = engine._components.optimizer
    if optimizer.scaler is not None and saved.get("scaler") is not None:
        optimizer.scaler.load_state_dict(saved["scaler"])
    now, before = type(optimizer.optimizer).__name__, saved.get("class")
    if before not in (None, now):
        say(f"the checkpoint is of {before}, the engine has {now}: the state is taken over by its keys")


def restore_scheduler(engine: Any, saved: Any) -> None:
    """Take back the schedule."""
    if saved is None or engine.lr_scheduler is None:
        return
    try:
        engine.lr_scheduler.load_state_dict(saved)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the scheduler {type(engine.lr_scheduler).__name__} does not take the saved state ({error!r}); load with "
            f"load_lr_scheduler_states=False if it is meant to be another one"
        ) from error


def window_fits(engine: Any, saved: dict[str, Any]) -> bool:
    """Whether the micro-batches of a saved window are a whole number of micro-batches here, of an equal batch."""
    then, seen = saved.get("batch"), saved.get("window", {}).get("seen", 0)
    if then is None:
        return False
    now = (engine._micro, engine.world_size)
    samples = seen * then["micro"] * then["ranks"]
    batch = then["micro"] * then["ranks"] * then["gas"]
    return batch == now[0] * now[1] * engine._gas and samples % (now[0] * now[1]) == 0


def restore_window(engine: Any, saved: dict[str, Any], window: dict[str, Any] | None, same_ranks: bool) -> None:
    """Go on in the middle of a window, once its gradients are back.

    Args:
        engine: the engine.
        saved: what `capture_run` gave.
        window: this rank's own part of it.
        same_ranks: as many ranks as saved.
    """
    then, optimizer = saved["batch"], engine._components.optimizer
    engine._seen = saved["window"]["seen"] * then["micro"] * then["ranks"] // (engine._micro * engine.world_size)
    engine._sums = saved["window"]["sums"]
    if window is not None and same_ranks:
        optimizer._items, optimizer._counts_items, optimizer._micro_batches = window["counts"]
    engine._tell_reducer()


def restart_window(engine: Any, saved: dict[str, Any]) -> None:
    """Go on from the beginning of a window: its gradients are dropped, its samples come again."""
    seen, then = saved["window"]["seen"], saved["batch"]
    loader = engine.training_dataloader
    if isinstance(loader, DeepSpeedDataLoader):
        loader.rewind(seen * then["micro"] * then["ranks"])
    engine.micro_steps -= seen
    say(
        f"the checkpoint was saved after {seen} of {then['gas']} micro-batches of a window, which are no whole number "
        f"of micro-batches on {engine.world_size} rank(s): the window starts again"
    )
