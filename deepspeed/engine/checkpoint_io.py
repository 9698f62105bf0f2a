"""Checkpoints of an engine: what is saved and loaded, in which order; formats are in `deepspeed/checkpoint`."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint import files, restore
from deepspeed.checkpoint.background import Background
from deepspeed.checkpoint.beside import SCRIPTS, plain, upstream_names
from deepspeed.checkpoint.capture import Captured, capture
from deepspeed.checkpoint.find import Finder
from deepspeed.checkpoint.foreign import open_foreign
from deepspeed.checkpoint.keep import prune
from deepspeed.checkpoint.manifest import LEFT_OUT, Manifest
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.checkpoint.save import Contents, Saving, Target
from deepspeed.checkpoint.source import NativeSource, Source
from deepspeed.checkpoint.tensorfile import Seal
from deepspeed.checkpoint.upstream_write import UpstreamWriter
from deepspeed.engine import run_state
from deepspeed.engine.weights_io import WeightsIO
from deepspeed.errors import CheckpointCorruptError, CheckpointError, NotAvailableError
from deepspeed.foundation.log import say, warn_once
from deepspeed.version import __version__
from deepspeed.zero.gathered import GatheredParameters
from deepspeed.zero.state_view import StateView


@dataclass(frozen=True)
class _What:
    """What a load takes over; see `load_checkpoint`."""

    strict: bool
    optimizer: bool
    scheduler: bool
    run: bool
    custom: Callable[..., Any] | None


class CheckpointIO(WeightsIO):
    """The checkpoint side of the engine."""

    mpu: Any
    optimizer: Any
    global_steps: int
    local_rank: Any
    _seen: int
    _gas: int
    compression: Any
    _replay_removals: Callable[[dict[str, Any]], None]
    config: Any
    _tell_reducer: Callable[[], None]

    @cached_property
    def _background(self) -> Background:
        return Background()

    @cached_property
    def _extra_objects(self) -> list[Any]:
        return []

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load the state of these objects with every checkpoint.

        Args:
            objects: each with `state_dict()` and `load_state_dict(state)`; the order counts.
        """
        for one in objects:
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                raise CheckpointError(f"a {type(one).__name__} has no state_dict and load_state_dict to checkpoint")
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
        """Write `<save_dir>/<tag>/`; all ranks call together.

        A checkpoint of that tag stays whole until the new one is. With `checkpoint.async_save` this returns as soon
        as the state is copied; a failure is raised by the next save, load or `destroy`.

        Args:
            save_dir: folder of checkpoints; made if it is not there.
            tag: name of this one; None: `global_step<N>`.
            client_state: values to get back from `load_checkpoint`; rank 0's count.
            save_latest: loading without a tag finds this one.
            exclude_frozen_parameters: leave parameters out that do not require a gradient.

        Returns:
            True.

        Raises:
            CheckpointError: something has no place in a checkpoint, the disk is too full, or writing failed; the
                checkpoints that were there before are as they were.
        """
        started = time.perf_counter()
        self.wait_for_checkpoint()
        self._check_whole()
        self._check_parallelism()
        settings = self.ds_config.top.checkpoint
        ranks = Ranks(self._axes.world)
        node_local = settings.use_node_local_storage and self.local_rank == 0
        target = Target(
            Path(save_dir),
            files.checked_tag(tag if tag is not None else f"global_step{self.global_steps}"),
            ranks.rank == 0 or node_local,
            save_latest,
            SCRIPTS,
            settings.tag_validation,
        )
        saving = Saving(target, self._contents(ranks, client_state or {}, exclude_frozen_parameters), ranks)
        saving.begin()
        if settings.async_save or settings.writer.decoupled:
            aside = self._background.ranks(self._axes.world)
            self._background.start(saving, aside, lambda: self._finish(saving, aside, started))
        else:
            saving.place()
            saving.write()
            self._finish(saving, ranks, started)
        return True

    def _finish(self, saving: Saving, ranks: Ranks, started: float) -> None:
        """What follows once all tensors are written."""
        settings, target = self.ds_config.top.checkpoint, saving.target
        saving.commit(self._upstream_files(saving, ranks) if settings.format == "deepspeed" else None)
        if settings.keep_last is not None:
            with ranks.together("removing old checkpoints"):
                if target.leads:
                    prune(target.folder, target.tag, settings.keep_last, settings.keep_every)
        if settings.writer.show_statistics:
            seconds, mib = time.perf_counter() - started, sum(entry.nbytes for entry in saving.entries) / 2**20
            say(f"checkpoint '{target.tag}': {mib:.0f} MiB per rank in {seconds:.2f} s, {mib / seconds:.0f} MiB/s")

    def _upstream_files(self, saving: Saving, ranks: Ranks) -> Callable[[Path, Manifest], dict[str, Seal]]:
        """What writes upstream's files next to the native ones of a save."""
        run, client = saving.contents.state["engine"], saving.contents.state["client_state"]
        counters = {name: run["counters"][name] for name in ("global_steps", "skipped_steps", "global_samples")}
        shared = {**counters, "lr_scheduler": run["scheduler"], "ds_config": self.config, **plain(client)}
        optimizer = run.get("optimizer", {})
        settings, scale = optimizer.get("groups", []), (optimizer.get("scaler") or {}).get("scale", 1.0)

        def write(folder: Path, manifest: Manifest) -> dict[str, Seal]:
            source = NativeSource(folder, manifest, ranks, [set(manifest.files)] * ranks.size)
            return UpstreamWriter(source, ranks, settings, scale, shared).write()

        return write

    def wait_for_checkpoint(self) -> None:
        """Wait for a save that is under way, and raise what went wrong with it."""
        self._background.wait()

    def _check_parallelism(self) -> None:
        size = getattr(self.mpu, "get_model_parallel_world_size", lambda: 1)()
        if size != 1:
            raise NotAvailableError(f"checkpoints of {size} model-parallel ranks are not available yet")

    def _contents(self, ranks: Ranks, client_state: dict[str, Any], leave_out_frozen: bool) -> Contents:
        view = self._state_view()
        view.settle()
        view.settle_gradients(ranks.gather)
        captured = capture(view, leave_out_frozen)
        captured.private |= run_state.capture_private(self)
        self._add_own_buffers(captured, view, ranks)
        state = {
            "engine": run_state.capture_run(self),
            "client_state": client_state,
            "objects": [one.state_dict() for one in self._extra_objects],
            "module": _extra_state(self.module),
        }
        about = {
            "package": __version__,
            "ranks": ranks.size,
            "global_steps": self.global_steps,
            "stage": self.ds_config.zero.stage,
            "precision": str(self._components.dtype).removeprefix("torch."),
            "aliases": view.aliases,
            "group_names": [[group.name, group.layout.ranks] for group in view.groups],
            "has_gradients": view.has_gradients,
            "model_config": _model_config(self.module),
        }
        settings = self.ds_config.top.checkpoint
        beside = {}
        if ranks.rank == 0 and settings.format == "native":
            beside = upstream_names(client_state, about, state["engine"]["counters"])
        return Contents(captured, state, about, beside, settings.client_state_pickle)

    def _add_own_buffers(self, captured: Captured, view: StateView, ranks: Ranks) -> None:
        """Buffers that differ from rank 0's, as running statistics do, are this rank's own state."""
        if not view.buffers:
            return
        prints = ranks.gather({name: _fingerprint(buffer) for name, buffer in view.buffers.items()})
        own = [name for name, print_ in prints[ranks.rank].items() if print_ != prints[0].get(name)]
        captured.private["buffers"] = {name: view.buffers[name].detach().clone() for name in own}

    def _state_view(self) -> StateView:
        components = self._components
        return StateView(self.module, components.groups, self._axes.world, components.optimizer, components.reducer)

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
        """Read a checkpoint into the engine, whatever stage, precision and number of ranks it was saved with.

        Args:
            load_dir: folder of checkpoints.
            tag: which; None: what `latest` names, or the newest that is complete.
            load_module_strict: the same parameters and buffers must be on both sides.
            load_optimizer_states: optimizer, loss scale and gradients of an open window too.
            load_lr_scheduler_states: the schedule too.
            load_module_only: weights and client state alone; counters stay.
            custom_load_fn: called as `custom_load_fn(src=state_dict, dst=module)` instead of matching names.

        Returns:
            (folder that was read, client state); (None, None) when there is no checkpoint.

        Raises:
            CheckpointMissingError: the tag, or one of its files, is not there.
            CheckpointCorruptError: it is broken.
            CheckpointError: it does not fit the model.

        A checkpoint that does not fit is refused before anything is changed. Bytes that turn out to be wrong are
        found while tensors are replaced: the engine then raises `UsageError` until another load has gone through.
        """
        self.wait_for_checkpoint()
        ranks = Ranks(self._axes.world)
        finder = Finder(Path(load_dir), ranks, self.ds_config.top.checkpoint.client_state_pickle)
        what = _What(
            load_module_strict,
            load_optimizer_states and not load_module_only,
            load_lr_scheduler_states and not load_module_only,
            not load_module_only,
            custom_load_fn,
        )
        if tag is not None:
            found = finder.named(files.checked_tag(tag))
            return self._load(found, ranks, what)
        return self._load_latest(finder, ranks, what)

    def _load_latest(self, finder: Finder, ranks: Ranks, what: _What) -> tuple[str | None, dict[str, Any] | None]:
        name = files.LATEST_UNIVERSAL if self.ds_config.top.checkpoint.load_universal else files.LATEST
        tag = finder.latest(name)
        if tag is None and name == files.LATEST_UNIVERSAL:
            raise CheckpointError(f"{finder.folder} has no '{name}' (checkpoint.load_universal)")
        if tag is not None:
            try:
                return self._load(finder.named(tag), ranks, what)
            except CheckpointCorruptError as error:
                finder.skip(tag, str(error))
            except FileNotFoundError as error:
                finder.skip(tag, str(error))
        while True:
            found = finder.newest(set(finder.skipped))
            if found is None:
                if finder.skipped:
                    raise CheckpointCorruptError(f"no checkpoint in {finder.folder} can be loaded: {finder.skipped}")
                warn_once(f"there is no checkpoint in {finder.folder}; nothing was loaded")
                return None, None
            try:
                return self._load(found, ranks, what)
            except CheckpointCorruptError as error:
                finder.skip(found.path.name, str(error))

    def _load(self, found: Source | Path, ranks: Ranks, what: _What) -> tuple[str, dict[str, Any]]:
        source = self._opened(found, ranks)
        view = self._state_view()
        saved = source.state()
        run = saved.get("engine", {})
        rows, report = restore.compare(view, source, what.strict and what.custom is None)
        with ranks.together("comparing the checkpoint with the engine"):
            optimizer = run.get("optimizer") if what.optimizer and self._components.optimizer is not None else None
            settings = None if optimizer is None else optimizer["groups"]
            if settings is not None:
                restore.check_optimizer(view, source, rows, settings)
            if what.run:
                self._check_objects(saved.get("objects", []))
        with self._replacing(optimizer is not None):
            self._forget_window()
            if what.custom is None:
                restore.load_values(view, source, rows, settings)
            else:
                self._load_custom(source, view, what.custom)
                if settings is not None:
                    restore.load_optimizer(view, source, rows, settings)
            if optimizer is not None:
                run_state.restore_optimizer(self, optimizer)
            if what.scheduler:
                run_state.restore_scheduler(self, run.get("scheduler"))
            for name, state in saved.get("module", {}).items():
                self.module.get_submodule(name).set_extra_state(state)
            if what.run and "compression" in run and self.compression is not None:
                self.compression.load_state_dict(run["compression"])
            if what.run:
                self._restore_run(source, view, rows, run, what.optimizer)
                for one, state in zip(self._extra_objects, saved.get("objects", []), strict=True):
                    one.load_state_dict(state)
        self._tell_reducer()
        left = f", {len(report.left_out)} frozen parameters kept (the save left them out)" if report.left_out else ""
        gone = f", missing {report.missing[:4]}" if report.missing else ""
        more = f", not used {report.unexpected[:4]}" if report.unexpected else ""
        say(f"loaded {report.elements:,} of {report.total:,} elements from {source.path}{left}{gone}{more}")
        return str(source.path), saved.get("client_state", {})

    def _opened(self, found: Source | Path, ranks: Ranks) -> Source:
        """The source of a load; the model is what it was when that was saved, if units had been removed by then."""
        if not isinstance(found, Source):
            with ranks.together("opening the checkpoint"):
                return open_foreign(found, self._state_view().optimizer_names())
        self._replay_removals(found.state().get("engine", {}).get("compression", {}))
        return found

    def _forget_window(self) -> None:
        if self._components.optimizer is not None:
            self._components.optimizer.zero_grad()
        if self._components.lifecycle is not None:
            self._components.lifecycle.keeper.free_idle()
        self._seen = 0

    def _restore_run(
        self, source: Source, view: StateView, rows: dict[str, Any], run: dict[str, Any], gradients: bool
    ) -> None:
        """Counters, data position, this rank's randomness, and the gradients of an open window."""
        run_state.restore_run(self, run)
        world = self._axes.world
        same_ranks = source.manifest.about.get("ranks") == world.size
        private = source.private(world.rank) if same_ranks else {}
        if "random" in private:
            run_state.restore_random(private["random"])
        for name, values in private.get("buffers", {}).items():
            if name in view.buffers:
                view.buffers[name].copy_(values)
        window = run.get("window", {})
        has_gradients = bool(source.manifest.about.get("has_gradients"))
        if not (window.get("seen") or has_gradients):
            return
        if not (gradients and run_state.window_fits(self, run)):
            run_state.restart_window(self, run)
            return
        if has_gradients:
            same, touched = restore.load_window(view, source, rows, world.rank, private)
            view.resume_window(touched, private["window"]["deferred"] if same else self._gas > 1)
        run_state.restore_window(self, run, private.get("window"), same_ranks)

    def _check_objects(self, states: list[Any]) -> None:
        if len(states) != len(self._extra_objects):
            raise CheckpointError(
                f"the checkpoint holds the state of {len(states)} registered objects, and {len(self._extra_objects)} "
                f"are registered here; call register_for_checkpointing with the same objects before loading"
            )

    def _load_custom(self, source: Source, view: StateView, load: Callable[..., Any]) -> None:
        """Hand the whole state dict and the gathered module to a client's function; rank 0's module counts."""
        rows = [row for row in source.manifest.rows if row.kind != LEFT_OUT]
        state = {row.name: source.whole(row.name) for row in rows}
        state |= {alias: state[name] for alias, name in source.manifest.aliases.items() if name in state}
        with GatheredParameters(list(self.module.parameters()), modifier_rank=self._axes.world.ranks[0]):
            load(src=state, dst=self.module)
        view.settle()


def _extra_state(module: torch.nn.Module) -> dict[str, Any]:
    """What modules give as extra state, by module name."""
    none = torch.nn.Module.get_extra_state
    having = [(name, child) for name, child in module.named_modules() if type(child).get_extra_state != none]
    return {name: child.get_extra_state() for name, child in having}


def _model_config(module: torch.nn.Module) -> str | None:
    """The JSON of a Hugging Face model's configuration, so that an export can be opened by its library."""
    config: Any = getattr(module, "config", None)
    return config.to_json_string(use_diff=False) if hasattr(config, "to_json_string") else None


def _fingerprint(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
