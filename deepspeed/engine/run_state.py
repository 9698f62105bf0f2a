"""The small state of a run, beside its tensors: counters, window, loss scale, schedule, data position, randomness."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.activation_checkpointing.rng import tracker
from deepspeed.engine.dataloader import DeepSpeedDataLoader
from deepspeed.engine.state import EngineState
from deepspeed.errors import CheckpointError
from deepspeed.foundation.log import say
from deepspeed.zero.accumulation import Way

COUNTERS = ("global_steps", "micro_steps", "global_samples", "skipped_steps")


def capture_run(state: EngineState) -> dict[str, Any]:
    """The state that all ranks share.

    Args:
        state: of the engine.
    """
    optimizer, loader, window = state.components.optimizer, state.training_dataloader, state.window
    made: dict[str, Any] = {
        "counters": {name: getattr(state, name) for name in COUNTERS},
        "window": {"seen": window.seen, "sums": bool(window.ways & Way.SUM)},
        "batch": {"micro": window.micro, "gas": window.steps, "ranks": state.axes.data.size},
        "data": loader.state_dict() if isinstance(loader, DeepSpeedDataLoader) else None,
        "scheduler": state.lr_scheduler.state_dict() if hasattr(state.lr_scheduler, "state_dict") else None,
    }
    if state.compression is not None or state.removals:
        more = {} if state.compression is None else state.compression.state_dict()
        made["compression"] = {**more, "removals": [removal.to_json() for removal in state.removals]}
    if optimizer is not None:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        scaler = None if optimizer.scaler is None else optimizer.scaler.state_dict()
        made["optimizer"] = {"class": type(optimizer.optimizer).__name__, "groups": groups, "scaler": scaler}
    return made


def capture_private(state: EngineState) -> dict[str, Any]:
    """The state that belongs to this rank alone."""
    optimizer, reducer = state.components.optimizer, state.components.reducer
    made: dict[str, Any] = {"random": capture_random()}
    window = state.window
    if optimizer is not None and reducer is not None and window.seen + (not reducer.clean):
        made["window"] = {"ways": window.ways, "items": window.items, "deferred": window.deferred}
    return made


def capture_random() -> dict[str, Any]:
    """The states of all random generators of this process, those that `get_cuda_rng_tracker` has by name included."""
    accelerator = get_accelerator()
    made: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    made["named"] = tracker.get_states()
    if accelerator.device_name() != "cpu":
        made["device"] = accelerator.get_rng_state()
    return made


def restore_random(saved: dict[str, Any]) -> None:
    """Put the random generators back; named states that the checkpoint lacks stay as they are."""
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    tracker.set_states(tracker.get_states() | saved.get("named", {}))
    if "device" in saved and get_accelerator().device_name() != "cpu":
        get_accelerator().set_rng_state(saved["device"])


def restore_run(state: EngineState, saved: dict[str, Any]) -> None:
    """Take back counters and data position; those of the window come with its gradients."""
    for name, value in saved.get("counters", {}).items():
        setattr(state, name, value)
    loader = state.training_dataloader
    if saved.get("data") is not None and isinstance(loader, DeepSpeedDataLoader):
        loader.load_state_dict(saved["data"])


def restore_optimizer(state: EngineState, saved: dict[str, Any]) -> None:
    """Take back the loss scaler; say so when the optimizer is another one."""
    optimizer = state.components.optimizer
    if optimizer is None:
        return
    if optimizer.scaler is not None and saved.get("scaler") is not None:
        optimizer.scaler.load_state_dict(saved["scaler"])
    now, before = type(optimizer.optimizer).__name__, saved.get("class")
    if before not in (None, now):
        say(f"the checkpoint is of {before}, the engine has {now}: the state is taken over by its keys")


def restore_scheduler(state: EngineState, saved: Any) -> None:
    """Take back the schedule."""
    if saved is None or state.lr_scheduler is None:
        return
    try:
        state.lr_scheduler.load_state_dict(saved)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the scheduler {type(state.lr_scheduler).__name__} does not take the saved state ({error!r}); load with "
            f"load_lr_scheduler_states=False if it is meant to be another one"
        ) from error


def window_fits(state: EngineState, saved: dict[str, Any]) -> bool:
    """Whether the micro-batches of a saved window are a whole number of micro-batches here, of an equal batch."""
    then, seen = saved.get("batch"), saved.get("window", {}).get("seen", 0)
    if then is None:
        return False
    now = (state.window.micro, state.axes.data.size)
    samples = seen * then["micro"] * then["ranks"]
    batch = then["micro"] * then["ranks"] * then["gas"]
    return batch == now[0] * now[1] * state.window.steps and samples % (now[0] * now[1]) == 0


def restore_window(state: EngineState, saved: dict[str, Any], window: dict[str, Any] | None, same_ranks: bool) -> None:
    """Go on in the middle of a window, once its gradients are back.

    Args:
        state: of the engine.
        saved: what `capture_run` gave.
        window: this rank's own part of it.
        same_ranks: as many ranks as saved.
    """
    then, now = saved["batch"], state.window
    seen = saved["window"]["seen"] * then["micro"] * then["ranks"] // (now.micro * state.axes.data.size)
    ways, items = int(Way.SUM if saved["window"]["sums"] else Way.NONE), 0.0
    if window is not None and same_ranks:
        ways, items = _counted(window, ways)
    now.resume(seen, ways, items)


def _counted(window: dict[str, Any], sums: int) -> tuple[int, float]:
    """(ways of counting, items) of a rank's window; earlier checkpoints say (items, whether they count, backwards)."""
    if "ways" in window:
        return window["ways"], window["items"]
    items, counts, backwards = window["counts"]
    return int(Way.ITEMS) if counts else sums or int(Way.MEAN if backwards else Way.NONE), items


def restart_window(state: EngineState, saved: dict[str, Any]) -> None:
    """Go on from the beginning of a window: its gradients are dropped, its samples come again."""
    seen, then = saved["window"]["seen"], saved["batch"]
    loader = state.training_dataloader
    if isinstance(loader, DeepSpeedDataLoader):
        loader.rewind(seen * then["micro"] * then["ranks"])
    state.micro_steps -= seen
    say(
        f"the checkpoint was saved after {seen} of {then['gas']} micro-batches of a window, which are no whole number "
        f"of micro-batches on {state.axes.data.size} rank(s): the window starts again"
    )
