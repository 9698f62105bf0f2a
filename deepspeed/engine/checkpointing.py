"""Saving and loading of an engine's checkpoints, with the state of the run (counters, data position, random states)."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.activation_checkpointing.rng import tracker
from deepspeed.checkpoint.compat.upstream_read import open_foreign
from deepspeed.checkpoint.compat.upstream_write import SCRIPTS, UpstreamWriter, plain, upstream_names
from deepspeed.checkpoint.format import filesystem
from deepspeed.checkpoint.format.manifest import LEFT_OUT, Manifest
from deepspeed.checkpoint.format.safetensors_file import Seal
from deepspeed.checkpoint.load import load
from deepspeed.checkpoint.load.directory import Finder, prune
from deepspeed.checkpoint.load.reader import NativeSource, Source
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.checkpoint.save.save import Background, Contents, Saving, Target
from deepspeed.checkpoint.save.save_plan import Snapshot, capture
from deepspeed.comm.process_groups.process_group import get_local_rank
from deepspeed.data.loader import own_loader
from deepspeed.engine.engine_state import EngineState
from deepspeed.engine.state_dict_io import WeightsIO
from deepspeed.errors import CheckpointCorruptError, CheckpointError
from deepspeed.foundation.log import log_rank0, warn_once
from deepspeed.foundation.malloc import own_pages
from deepspeed.foundation.spans import SAVE, recorder
from deepspeed.version import __version__
from deepspeed.zero.api.gathered_parameters import GatheredParameters
from deepspeed.zero.api.state_view import StateView
from deepspeed.zero.gradients.accumulation import Way

COUNTERS = ("global_steps", "micro_steps", "global_samples", "skipped_steps")


class RunState:
    """State of a run besides its tensors: counters, schedule, data position, random generators, accumulation window."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def capture(self) -> dict[str, Any]:
        """Return the part of the state that is equal on all ranks, by name."""
        state = self._state
        optimizer, loader, window = state.components.optimizer, own_loader(state.training_dataloader), state.window
        run_state: dict[str, Any] = {
            "counters": {name: getattr(state, name) for name in COUNTERS},
            "window": {"seen": window.seen, "sums": bool(window.ways & Way.SUM)},
            "batch": {"micro": window.micro, "gas": window.steps, "ranks": state.axes.data.size},
            "data": None if loader is None else loader.state_dict(),
            "scheduler": state.lr_scheduler.state_dict() if hasattr(state.lr_scheduler, "state_dict") else None,
        }
        if state.compression is not None or state.removals:
            more = {} if state.compression is None else state.compression.state_dict()
            run_state["compression"] = {**more, "removals": [removal.to_json() for removal in state.removals]}
        if state.random_ltd is not None:
            state.random_ltd.update_seq(state.global_steps)
            run_state["random_ltd"] = state.random_ltd.state_dict()
        if optimizer is not None:
            groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            scaler = None if optimizer.scaler is None else optimizer.scaler.state_dict()
            run_state["optimizer"] = {"class": type(optimizer.optimizer).__name__, "groups": groups, "scaler": scaler}
            if named := optimizer.state.without_parameter():
                run_state["optimizer"]["named"] = named
        return run_state

    def capture_private(self) -> dict[str, Any]:
        """Return this rank's own state.

        "random": generators; "window", if gradients are pending: weighting; "errors", if gradients are encoded with an
        error memory: memories.
        """
        accelerator, parts, window = get_accelerator(), self._state.components, self._state.window
        random_state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "named": tracker.get_states(),
        }
        if accelerator.device_name() != "cpu":
            random_state["device"] = accelerator.get_rng_state()
        private_state: dict[str, Any] = {"random": random_state}
        if parts.optimizer is not None and parts.reducer is not None and window.seen + (not parts.reducer.clean):
            private_state["window"] = {"ways": window.ways, "items": window.items, "deferred": window.deferred}
        if parts.reducer is not None and (memories := parts.reducer.error_memories()):
            private_state["errors"] = {name: memory.state() for name, memory in memories.items()}
        return private_state

    def restore_errors(self, saved: dict[str, Any]) -> None:
        """Restore the error memories from the "errors" entry of `capture_private`; missing ones are set to zero."""
        reducer = self._state.components.reducer
        memories = {} if reducer is None else reducer.error_memories()
        dropped = [name for name, memory in memories.items() if not (name in saved and memory.load(saved[name]))]
        for name in dropped:
            memories[name].clear()
        if dropped:
            log_rank0(
                f"{len(dropped)} of {len(memories)} error memories of encoded gradients start at zero: the checkpoint "
                f"has none for this mesh"
            )

    def restore_random(self, saved: dict[str, Any]) -> None:
        """Restore the random generators from the "random" entry of `capture_private`; missing ones do not change."""
        random.setstate(saved["python"])
        np.random.set_state(saved["numpy"])
        torch.set_rng_state(saved["torch"])
        tracker.set_states(tracker.get_states() | saved.get("named", {}))
        if "device" in saved and get_accelerator().device_name() != "cpu":
            get_accelerator().set_rng_state(saved["device"])

    def restore_counters(self, saved: dict[str, Any]) -> None:
        """Restore counters and data position from the result of `capture`, without the accumulation window."""
        for name, value in saved.get("counters", {}).items():
            setattr(self._state, name, value)
        if self._state.random_ltd is not None and "random_ltd" in saved:
            self._state.random_ltd.load_state_dict(saved["random_ltd"])
        loader, position = own_loader(self._state.training_dataloader), saved.get("data")
        if loader is not None and position is not None:
            loader.load_state_dict(position)
        elif position is not None:
            log_rank0(
                f"the checkpoint's position in the data (epoch {position['epoch']}, {position['seen']} samples) is not "
                f"used: the engine has no loader that keeps one; set engine.training_dataloader before load_checkpoint"
            )
        elif loader is not None and "counters" in saved:
            log_rank0("the checkpoint has no position in the data: training_data begins at its start")

    def restore_optimizer(self, saved: dict[str, Any]) -> None:
        """Restore the loss scaler and optimizer state that belongs to no parameter; logs if the class differs."""
        optimizer = self._state.components.optimizer
        if optimizer is None:
            return
        if optimizer.scaler is not None and saved.get("scaler") is not None:
            optimizer.scaler.load_state_dict(saved["scaler"])
        optimizer.state.update(saved.get("named", {}))
        now, before = type(optimizer.optimizer).__name__, saved.get("class")
        if before not in (None, now):
            log_rank0(f"the checkpoint is of {before}, the engine has {now}: the state is taken over by its keys")

    def restore_scheduler(self, saved: Any) -> None:
        scheduler = self._state.lr_scheduler
        if saved is None or scheduler is None:
            return
        try:
            scheduler.load_state_dict(saved)
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"the scheduler {type(scheduler).__name__} does not take the saved state ({error!r}); load with "
                f"load_lr_scheduler_states=False if it is meant to be another one"
            ) from error

    def window_fits(self, saved: dict[str, Any]) -> bool:
        """Return whether a saved accumulation window can be continued.

        The global batch sizes must be equal, and the window's samples a whole number of this run's micro-batches.
        """
        then, seen = saved.get("batch"), saved.get("window", {}).get("seen", 0)
        if then is None:
            return False
        size, samples = self._state.window.micro * self._state.axes.data.size, seen * then["micro"] * then["ranks"]
        batch = then["micro"] * then["ranks"] * then["gas"]
        return batch == size * self._state.window.steps and samples % size == 0

    def restore_window(self, saved: dict[str, Any], window: dict[str, Any] | None) -> None:
        """Continue in the middle of a saved accumulation window, after its gradients were loaded.

        Args:
            saved: result of `capture`.
            window: "window" entry of this rank's `capture_private`; None if there is none.
        """
        then, now = saved["batch"], self._state.window
        seen = saved["window"]["seen"] * then["micro"] * then["ranks"] // (now.micro * self._state.axes.data.size)
        ways, items = int(Way.SUM if saved["window"]["sums"] else Way.NONE), 0.0
        if window is not None and "ways" in window:
            ways, items = window["ways"], window["items"]
        elif window is not None:  # earlier checkpoints contain (items, whether they count, backward passes)
            items, counts, backwards = window["counts"]
            ways = int(Way.ITEMS) if counts else ways or int(Way.MEAN if backwards else Way.NONE)
        now.resume(seen, ways, items)

    def restart_window(self, saved: dict[str, Any], why: str) -> None:
        """Restart a saved accumulation window: its gradients are not loaded, and its samples are read again.

        Args:
            saved: result of `capture`.
            why: reason for the log.
        """
        seen, then, loader = saved["window"]["seen"], saved["batch"], own_loader(self._state.training_dataloader)
        if loader is not None:
            loader.rewind(seen, then["micro"], then["ranks"])
        self._state.micro_steps -= seen
        log_rank0(
            f"the checkpoint was saved after {seen} of {then['gas']} micro-batches of a window, which starts again: "
            f"{why}"
        )


@dataclass(frozen=True)
class LoadOptions:
    """Selection of the state that a load restores; see `CheckpointIO.load_checkpoint`."""

    strict: bool
    optimizer: bool
    scheduler: bool
    run: bool
    custom: Callable[..., Any] | None


class CheckpointIO:
    """Saving and loading of checkpoints; `guard` creates a context that adds a report to out-of-memory errors."""

    def __init__(
        self, state: EngineState, weights: WeightsIO, guard: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self._state, self._weights, self._guard, self._run = state, weights, guard, RunState(state)
        self._background = Background()
        self._extra_objects: list[Any] = []

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load the state of these objects with every checkpoint.

        Args:
            objects: objects with `state_dict()` and `load_state_dict(state)`, always registered in the same order.

        Raises:
            CheckpointError: an object lacks one of these methods.
        """
        for stateful in objects:
            if not (hasattr(stateful, "state_dict") and hasattr(stateful, "load_state_dict")):
                raise CheckpointError(
                    f"a {type(stateful).__name__} has no state_dict and load_state_dict to checkpoint"
                )
        self._extra_objects += objects

    # -- saving ---------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save a checkpoint to `<save_dir>/<tag>/`. All ranks must call this.

        An existing checkpoint of that tag is replaced only once the new one is complete. With `checkpoint.async_save`
        or `checkpoint.writer.decoupled`, the call returns once the state is copied; the next save, load or `destroy`
        raises errors of the save.

        Args:
            save_dir: parent folder of the checkpoints; created if missing.
            tag: name of this checkpoint; None: `global_step<N>`.
            client_state: values that `load_checkpoint` returns; rank 0's are saved.
            save_latest: make this checkpoint the default for loading without a tag.
            exclude_frozen_parameters: omit parameters that do not require a gradient.

        Returns:
            True.

        Raises:
            CheckpointError: the tag or a value cannot be saved, the disk is full, or another rank failed.
            OSError: this rank could not write. Existing checkpoints are unchanged in any case.
            UsageError: the last load has failed midway.
        """
        with recorder.span(SAVE, "save"):
            return self._save(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)

    def _save(
        self,
        save_dir: str,
        tag: str | None,
        client_state: dict[str, Any] | None,
        save_latest: bool,
        leave_out_frozen: bool,
    ) -> bool:
        started = time.perf_counter()
        self.wait_for_checkpoint()
        self._weights.check_whole()
        settings = self._state.ds_config.top.checkpoint
        ranks = Ranks(self._state.everyone)
        self._check_format(ranks)
        node_local = settings.use_node_local_storage and get_local_rank() == 0
        target = Target(
            Path(save_dir),
            filesystem.checked_tag(tag if tag is not None else f"global_step{self._state.global_steps}"),
            ranks.rank == 0 or node_local,
            save_latest,
            SCRIPTS,
            settings.tag_validation,
        )
        for hook in self._state.hooks.checkpointed:
            hook(save_dir, client_state)
        saving = Saving(target, self._contents(ranks, client_state or {}, leave_out_frozen), ranks)
        saving.begin()
        if settings.async_save or settings.writer.decoupled:
            background_ranks = self._background.ranks(self._state.everyone)
            self._background.start(saving, background_ranks, lambda: self._finish(saving, background_ranks, started))
        else:
            saving.place()
            saving.write()
            self._finish(saving, ranks, started)
        return True

    def _finish(self, saving: Saving, ranks: Ranks, started: float) -> None:
        """Commit a save whose tensors are written, and remove old checkpoints."""
        settings, target = self._state.ds_config.top.checkpoint, saving.target
        saving.commit(self._upstream_files(saving, ranks) if settings.format == "deepspeed" else None)
        if settings.keep_last is not None:
            with ranks.together("removing old checkpoints"):
                if target.leads:
                    prune(target.folder, target.tag, settings.keep_last, settings.keep_every)
        if settings.writer.show_statistics:
            seconds, mib = time.perf_counter() - started, sum(entry.nbytes for entry in saving.entries) / 2**20
            log_rank0(
                f"checkpoint '{target.tag}': {mib:.0f} MiB per rank in {seconds:.2f} s, {mib / seconds:.0f} MiB/s"
            )

    def _upstream_files(self, saving: Saving, ranks: Ranks) -> Callable[[Path, Manifest], dict[str, Seal]]:
        """Create the function that writes a checkpoint in the original DeepSpeed's format next to the native one."""
        run, client = saving.contents.state["engine"], saving.contents.state["client_state"]
        counters = {name: run["counters"][name] for name in ("global_steps", "skipped_steps", "global_samples")}
        shared = {**counters, "lr_scheduler": run["scheduler"], "ds_config": self._state.ds_config.raw, **plain(client)}
        optimizer = run.get("optimizer", {})
        settings, scale = optimizer.get("groups", []), (optimizer.get("scaler") or {}).get("scale", 1.0)

        def write(folder: Path, manifest: Manifest) -> dict[str, Seal]:
            source = NativeSource(folder, manifest, ranks, [set(manifest.files)] * ranks.size)
            return UpstreamWriter(source, ranks, settings, scale, shared).write()

        return write

    def wait_for_checkpoint(self) -> None:
        """Wait for a pending asynchronous save; raises CheckpointError if the last one failed."""
        self._background.wait()

    def _check_format(self, ranks: Ranks) -> None:
        """Raise CheckpointError if the original format is requested, but ranks have model slices. Collective."""
        if self._state.ds_config.top.checkpoint.format == "deepspeed":
            sliced = ranks.gather(self._state.view().cut)
            if any(sliced) or self._state.sliced:
                raise CheckpointError(
                    "checkpoint.format: deepspeed cannot be written: ranks hold slices of the model, and the files of "
                    "its layout here are those of whole models; save natively and export with ds_checkpoint"
                )

    def _contents(self, ranks: Ranks, client_state: dict[str, Any], leave_out_frozen: bool) -> Contents:
        view = self._state.view()
        view.settle()
        view.settle_gradients(Ranks(self._state.axes.dp_sp_group).gather)
        captured = capture(view, leave_out_frozen)
        captured.private_state |= self._run.capture_private()
        self._add_own_buffers(captured, view, ranks)
        state = {
            "engine": self._run.capture(),
            "client_state": client_state,
            "objects": [stateful.state_dict() for stateful in self._extra_objects],
            "module": self._extra_state(ranks),
        }
        config: Any = getattr(self._state.module, "config", None)
        about = {
            "package": __version__,
            "ranks": ranks.size,
            "global_steps": self._state.global_steps,
            "stage": self._state.ds_config.zero.stage,
            "precision": str(self._state.components.dtype).removeprefix("torch."),
            "mesh": self._state.model_dims,
            "aliases": view.aliases,
            "has_gradients": any(ranks.gather(view.has_gradients)) if self._state.sliced else view.has_gradients,
            # For exports that Transformers can open.
            "model_config": config.to_json_string(use_diff=False) if hasattr(config, "to_json_string") else None,
        }
        settings = self._state.ds_config.top.checkpoint
        small_files = {}
        if ranks.rank == 0 and settings.format == "native":
            small_files = upstream_names(client_state, about, state["engine"]["counters"])
        return Contents(captured, state, about, small_files, settings.client_state_pickle)

    def _add_own_buffers(self, captured: Snapshot, view: StateView, ranks: Ranks) -> None:
        """Add this rank's buffers that differ from the first rank's to `captured.private_state`. Collective."""
        if not view.buffers and not self._state.sliced:
            return
        fingerprints = {}
        for name, buffer in view.buffers.items():
            flat = buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            fingerprints[name] = view.box(name), zlib.crc32(flat.numpy().tobytes())
        first: dict[Any, int] = {}
        for rank_fingerprints in ranks.gather(fingerprints):
            for name, (box, print_) in rank_fingerprints.items():
                first.setdefault((name, box), print_)
        own = [name for name, (box, print_) in fingerprints.items() if print_ != first[name, box]]
        captured.private_state["buffers"] = {name: view.buffers[name].detach().clone() for name in own}

    def _extra_state(self, ranks: Ranks) -> dict[str, Any]:
        """Return the extra state of modules on all pipeline stages, by module name. Collective."""
        default, modules = torch.nn.Module.get_extra_state, self._state.module.named_modules()
        own = {name: module for name, module in modules if type(module).get_extra_state != default}
        local_state = {name: module.get_extra_state() for name, module in own.items()}
        states = ranks.gather(local_state) if self._state.sliced else [local_state]
        return {name: state for rank_state in reversed(states) for name, state in rank_state.items()}

    # -- loading --------------------------------------------------------------------------------------------------

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint that was saved with any stage, precision and number of ranks. All ranks must call this.

        Names, shapes and optimizer groups are compared before tensors change; a compressed model is first cut to the
        shapes of the checkpoint. Damaged data, or a scheduler that refuses the saved state, is detected only while
        state is replaced: afterwards the engine raises `UsageError` until a load succeeds.

        Args:
            load_dir: parent folder of the checkpoints.
            tag: name of the checkpoint; None: that in `latest`, or if missing or damaged the newest complete one;
                with `checkpoint.load_universal` that in `latest_universal`, which must exist.
            load_module_strict: require the same parameters and buffers in model and checkpoint.
            load_optimizer_states: also load optimizer, loss scale and gradients of an accumulation window.
            load_lr_scheduler_states: also load the state of the learning-rate scheduler.
            load_module_only: load only weights and client state; counters do not change.
            custom_load_fn: called as `custom_load_fn(src=state_dict, dst=module)` instead of matching names.

        Returns:
            (folder of the checkpoint, client state with `ds_version`, the version that saved it);
            (None, None) if there is no checkpoint.

        Raises:
            CheckpointMissingError: the tag, or one of its files, does not exist.
            CheckpointCorruptError: the checkpoint is damaged (without a tag: all are).
            CheckpointError: the checkpoint does not match the model or the scheduler, `latest_universal` is missing, or
                the last asynchronous save failed.
        """
        self.wait_for_checkpoint()
        for hook in self._state.hooks.checkpointed:
            hook(load_dir, None)
        ranks = Ranks(self._state.everyone)
        finder = Finder(Path(load_dir), ranks, self._state.ds_config.top.checkpoint.client_state_pickle)
        options = LoadOptions(
            load_module_strict,
            load_optimizer_states and not load_module_only,
            load_lr_scheduler_states and not load_module_only,
            not load_module_only,
            custom_load_fn,
        )
        if tag is not None:
            source = finder.named(filesystem.checked_tag(tag))
            return self._load(source, ranks, options)
        return self._load_latest(finder, ranks, options)

    def _load_latest(
        self, finder: Finder, ranks: Ranks, options: LoadOptions
    ) -> tuple[str | None, dict[str, Any] | None]:
        name = filesystem.LATEST_UNIVERSAL if self._state.ds_config.top.checkpoint.load_universal else filesystem.LATEST
        tag = finder.latest(name)
        if tag is None and name == filesystem.LATEST_UNIVERSAL:
            raise CheckpointError(f"{finder.folder} has no '{name}' (checkpoint.load_universal)")
        if tag is not None:
            try:
                return self._load(finder.named(tag), ranks, options)
            except (CheckpointCorruptError, FileNotFoundError) as error:
                finder.skip(tag, str(error))
        while True:
            source = finder.newest(set(finder.skipped))
            if source is None:
                if finder.skipped:
                    raise CheckpointCorruptError(f"no checkpoint in {finder.folder} can be loaded: {finder.skipped}")
                warn_once(f"there is no checkpoint in {finder.folder}; nothing was loaded")
                return None, None
            try:
                return self._load(source, ranks, options)
            except (CheckpointCorruptError, FileNotFoundError) as error:
                finder.skip(source.path.name, str(error))

    def _load(self, source_or_path: Source | Path, ranks: Ranks, options: LoadOptions) -> tuple[str, dict[str, Any]]:
        source = self._opened(source_or_path, ranks)
        view = self._state.view()
        saved = source.state()
        run = saved.get("engine", {})
        elsewhere = self._state.names_elsewhere(view)
        with ranks.together("comparing the checkpoint with the engine"):
            rows, report = load.compare(view, source, options.strict and options.custom is None, elsewhere)
            if options.custom is not None:
                self._weights.check_custom(view)
            optimizer = (
                run.get("optimizer") if options.optimizer and self._state.components.optimizer is not None else None
            )
            settings = None if optimizer is None else optimizer["groups"]
            if settings is not None:
                load.check_optimizer(view, source, rows, settings)
            if options.run:
                self._check_objects(saved.get("objects", []))
        # A load creates and frees copies of the whole state: they must not fragment the heap.
        with self._weights.replacing(optimizer is not None), self._guard(), own_pages():
            self._state.forget_window()
            if options.custom is None:
                rounded = not self._state.ds_config.zero.load_from_fp32_weights
                load.load_values(view, source, rows, settings, rounded)
            else:
                self._load_custom(source, view, options.custom)
                if settings is not None:
                    load.load_optimizer(view, source, rows, settings)
            if optimizer is not None:
                self._run.restore_optimizer(optimizer)
            if options.scheduler:
                self._run.restore_scheduler(run.get("scheduler"))
            self._restore_modules(saved.get("module", {}))
            compressed = run.get("compression", {})
            if options.run and "training_steps" in compressed and self._state.compression is not None:
                self._state.compression.load_state_dict(compressed)
            if options.run:
                self._restore_run(source, view, rows, run, options.optimizer)
                for stateful, state in zip(self._extra_objects, saved.get("objects", []), strict=True):
                    stateful.load_state_dict(state)
        left = f", {len(report.left_out)} frozen parameters kept (the save left them out)" if report.left_out else ""
        gone = f", missing {report.missing[:4]}" if report.missing else ""
        more = f", not used {report.unexpected[:4]}" if report.unexpected else ""
        log_rank0(f"loaded {report.elements:,} of {report.total:,} elements from {source.path}{left}{gone}{more}")
        written_by = source.manifest.about.get("package")
        return str(source.path), {**({"ds_version": written_by} if written_by else {}), **saved.get("client_state", {})}

    def _restore_modules(self, saved: dict[str, Any]) -> None:
        modules = dict(self._state.module.named_modules())
        for name, state in saved.items():
            if name in modules or not self._state.sliced:  # else it belongs to another stage
                modules[name].set_extra_state(state)

    def _opened(self, source_or_path: Source | Path, ranks: Ranks) -> Source:
        """Open the source of a load; units that the saved model no longer has are also removed here. Collective."""
        if not isinstance(source_or_path, Source):
            with ranks.together("opening the checkpoint"):
                return open_foreign(source_or_path, self._state.view().optimizer_names(), ranks)
        for hook in self._state.hooks.opened:
            hook(source_or_path.state().get("engine", {}).get("compression", {}))
        return source_or_path

    def _restore_run(
        self, source: Source, view: StateView, rows: dict[str, Any], run: dict[str, Any], gradients: bool
    ) -> None:
        """Restore counters, data position, this rank's random states and buffers, and the accumulation window."""
        self._run.restore_counters(run)
        ranks, about = Ranks(self._state.everyone), source.manifest.about
        same_ranks = about.get("ranks") == ranks.size and about.get("mesh", {}) == self._state.model_dims
        private = source.private(ranks.rank) if same_ranks else {}
        if "random" in private:
            self._run.restore_random(private["random"])
        self._run.restore_errors(private.get("errors", {}))
        for name, values in private.get("buffers", {}).items():
            if name in view.buffers:
                view.buffers[name].copy_(values)
        window = run.get("window", {})
        has_gradients = bool(about.get("has_gradients"))
        if not (window.get("seen") or has_gradients):
            return
        if not self._run.window_fits(run):
            size = self._state.axes.data.size
            self._run.restart_window(run, f"its batch, or its part so far, cannot be divided so on {size} rank(s)")
            return
        if not gradients:
            self._run.restart_window(run, "its gradients are not loaded without the optimizer's state")
            return
        if has_gradients:
            same, touched = load.load_window(view, source, rows, ranks, private)
            deferred = private.get("window", {}).get("deferred") if same else None
            view.resume_window(touched, self._state.window.steps > 1 if deferred is None else deferred)
        self._run.restore_window(run, private.get("window"))

    def _check_objects(self, states: list[Any]) -> None:
        if len(states) != len(self._extra_objects):
            raise CheckpointError(
                f"the checkpoint holds the state of {len(states)} registered objects, and {len(self._extra_objects)} "
                f"are registered here; call register_for_checkpointing with the same objects before loading"
            )

    def _load_custom(self, source: Source, view: StateView, load: Callable[..., Any]) -> None:
        """Call a client's function with the whole state dict and the gathered module, and broadcast rank 0's module."""
        rows = [row for row in source.manifest.rows if row.kind != LEFT_OUT]
        state = {row.name: source.whole(row.name) for row in rows}
        state |= {alias: state[name] for alias, name in source.manifest.aliases.items() if name in state}
        first = self._state.axes.dp_sp_group.ranks[0]
        with GatheredParameters(list(self._state.module.parameters()), modifier_rank=first):
            load(src=state, dst=self._state.module)
        view.settle()
