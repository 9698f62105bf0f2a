"""Checkpoints of an engine: what is saved and loaded, in which order; formats are in `deepspeed/checkpoint`."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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
from deepspeed.comm.groups import get_local_rank
from deepspeed.engine import run_state
from deepspeed.engine.state import EngineState
from deepspeed.engine.weights_io import WeightsIO
from deepspeed.errors import CheckpointCorruptError, CheckpointError
from deepspeed.foundation.heap import own_pages
from deepspeed.foundation.log import say, warn_once
from deepspeed.foundation.recorder import SAVE, recorder
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


class CheckpointIO:
    """The checkpoints of an engine.

    Args:
        state: of the engine.
        weights: refuses what a load has left in pieces.
    """

    def __init__(self, state: EngineState, weights: WeightsIO) -> None:
        self._state, self._weights = state, weights
        self._background = Background()
        self._extra_objects: list[Any] = []
        self.replay_removals: Callable[[dict[str, Any]], None] = lambda _saved: None  # told of a save's removals
        self.guard: Callable[[], AbstractContextManager[None]] = nullcontext  # around what makes state
        self.remember: Callable[[Any, Any], None] = lambda _folder, _client_state: None  # told of every save and load

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
        """See `save_checkpoint`."""
        started = time.perf_counter()
        self.wait_for_checkpoint()
        self._weights.check_whole()
        settings = self._state.ds_config.top.checkpoint
        ranks = Ranks(self._state.everyone)
        self._check_format(ranks)
        node_local = settings.use_node_local_storage and get_local_rank() == 0
        target = Target(
            Path(save_dir),
            files.checked_tag(tag if tag is not None else f"global_step{self._state.global_steps}"),
            ranks.rank == 0 or node_local,
            save_latest,
            SCRIPTS,
            settings.tag_validation,
        )
        self.remember(save_dir, client_state)
        saving = Saving(target, self._contents(ranks, client_state or {}, leave_out_frozen), ranks)
        saving.begin()
        if settings.async_save or settings.writer.decoupled:
            aside = self._background.ranks(self._state.everyone)
            self._background.start(saving, aside, lambda: self._finish(saving, aside, started))
        else:
            saving.place()
            saving.write()
            self._finish(saving, ranks, started)
        return True

    def _finish(self, saving: Saving, ranks: Ranks, started: float) -> None:
        """What follows once all tensors are written."""
        settings, target = self._state.ds_config.top.checkpoint, saving.target
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
        shared = {**counters, "lr_scheduler": run["scheduler"], "ds_config": self._state.ds_config.raw, **plain(client)}
        optimizer = run.get("optimizer", {})
        settings, scale = optimizer.get("groups", []), (optimizer.get("scaler") or {}).get("scale", 1.0)

        def write(folder: Path, manifest: Manifest) -> dict[str, Seal]:
            source = NativeSource(folder, manifest, ranks, [set(manifest.files)] * ranks.size)
            return UpstreamWriter(source, ranks, settings, scale, shared).write()

        return write

    def wait_for_checkpoint(self) -> None:
        """Wait for a save that is under way, and raise what went wrong with it."""
        self._background.wait()

    def _check_format(self, ranks: Ranks) -> None:
        """Upstream's files are of data-parallel ranks: refuse where another rank has another slice of the model."""
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
        view.settle_gradients(Ranks(self._state.axes.same_slice).gather)
        captured = capture(view, leave_out_frozen)
        captured.private |= run_state.capture_private(self._state)
        self._add_own_buffers(captured, view, ranks)
        state = {
            "engine": run_state.capture_run(self._state),
            "client_state": client_state,
            "objects": [one.state_dict() for one in self._extra_objects],
            "module": self._extra_state(ranks),
        }
        about = {
            "package": __version__,
            "ranks": ranks.size,
            "global_steps": self._state.global_steps,
            "stage": self._state.ds_config.zero.stage,
            "precision": str(self._state.components.dtype).removeprefix("torch."),
            "mesh": self._state.model_dims,
            "aliases": view.aliases,
            "has_gradients": any(ranks.gather(view.has_gradients)) if self._state.sliced else view.has_gradients,
            "model_config": _model_config(self._state.module),
        }
        settings = self._state.ds_config.top.checkpoint
        beside = {}
        if ranks.rank == 0 and settings.format == "native":
            beside = upstream_names(client_state, about, state["engine"]["counters"])
        return Contents(captured, state, about, beside, settings.client_state_pickle)

    def _add_own_buffers(self, captured: Captured, view: StateView, ranks: Ranks) -> None:
        """Buffers that differ from the first rank's, as running statistics do, are this rank's own state."""
        if not view.buffers and not self._state.sliced:
            return
        mine = {name: (view.box(name), _fingerprint(buffer)) for name, buffer in view.buffers.items()}
        first: dict[Any, int] = {}
        for told in ranks.gather(mine):
            for name, (box, print_) in told.items():
                first.setdefault((name, box), print_)
        own = [name for name, (box, print_) in mine.items() if print_ != first[name, box]]
        captured.private["buffers"] = {name: view.buffers[name].detach().clone() for name in own}

    def _extra_state(self, ranks: Ranks) -> dict[str, Any]:
        """What modules give as extra state, by module name; of all stages."""
        mine = _extra_state(self._state.module)
        told = ranks.gather(mine) if self._state.sliced else [mine]
        return {name: state for one in reversed(told) for name, state in one.items()}

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
            (folder that was read, client state and with it `ds_version`, the version of what saved it);
            (None, None) when there is no checkpoint.

        Raises:
            CheckpointMissingError: the tag, or one of its files, is not there.
            CheckpointCorruptError: it is broken.
            CheckpointError: it does not fit the model.

        A checkpoint that does not fit is refused before anything is changed. Bytes that turn out to be wrong are
        found while tensors are replaced: the engine then raises `UsageError` until another load has gone through.
        """
        self.wait_for_checkpoint()
        self.remember(load_dir, None)
        ranks = Ranks(self._state.everyone)
        finder = Finder(Path(load_dir), ranks, self._state.ds_config.top.checkpoint.client_state_pickle)
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
        name = files.LATEST_UNIVERSAL if self._state.ds_config.top.checkpoint.load_universal else files.LATEST
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
        view = self._state.view()
        saved = source.state()
        run = saved.get("engine", {})
        elsewhere = self._state.names_elsewhere(view)
        with ranks.together("comparing the checkpoint with the engine"):
            rows, report = restore.compare(view, source, what.strict and what.custom is None, elsewhere)
            if what.custom is not None:
                self._weights.check_custom(view)
            optimizer = (
                run.get("optimizer") if what.optimizer and self._state.components.optimizer is not None else None
            )
            settings = None if optimizer is None else optimizer["groups"]
            if settings is not None:
                restore.check_optimizer(view, source, rows, settings)
            if what.run:
                self._check_objects(saved.get("objects", []))
        # A load makes and drops copies of all that there is: they are not to leave holes in the heap.
        with self._weights.replacing(optimizer is not None), self.guard(), own_pages():
            self._state.forget_window()
            if what.custom is None:
                rounded = not self._state.ds_config.zero.load_from_fp32_weights
                restore.load_values(view, source, rows, settings, rounded)
            else:
                self._load_custom(source, view, what.custom)
                if settings is not None:
                    restore.load_optimizer(view, source, rows, settings)
            if optimizer is not None:
                run_state.restore_optimizer(self._state, optimizer)
            if what.scheduler:
                run_state.restore_scheduler(self._state, run.get("scheduler"))
            self._restore_modules(saved.get("module", {}))
            compressed = run.get("compression", {})
            if what.run and "training_steps" in compressed and self._state.compression is not None:
                self._state.compression.load_state_dict(compressed)
            if what.run:
                self._restore_run(source, view, rows, run, what.optimizer)
                for one, state in zip(self._extra_objects, saved.get("objects", []), strict=True):
                    one.load_state_dict(state)
        left = f", {len(report.left_out)} frozen parameters kept (the save left them out)" if report.left_out else ""
        gone = f", missing {report.missing[:4]}" if report.missing else ""
        more = f", not used {report.unexpected[:4]}" if report.unexpected else ""
        say(f"loaded {report.elements:,} of {report.total:,} elements from {source.path}{left}{gone}{more}")
        written_by = source.manifest.about.get("package")
        return str(source.path), {**({"ds_version": written_by} if written_by else {}), **saved.get("client_state", {})}

    def _restore_modules(self, saved: dict[str, Any]) -> None:
        modules = dict(self._state.module.named_modules())
        for name, state in saved.items():
            if name in modules or not self._state.sliced:  # else it belongs to another stage
                modules[name].set_extra_state(state)

    def _opened(self, found: Source | Path, ranks: Ranks) -> Source:
        """The source of a load; the model is what it was when that was saved, if units had been removed by then."""
        if not isinstance(found, Source):
            with ranks.together("opening the checkpoint"):
                return open_foreign(found, self._state.view().optimizer_names())
        self.replay_removals(found.state().get("engine", {}).get("compression", {}))
        return found

    def _restore_run(
        self, source: Source, view: StateView, rows: dict[str, Any], run: dict[str, Any], gradients: bool
    ) -> None:
        """Counters, data position, this rank's randomness, and the gradients of an open window."""
        run_state.restore_run(self._state, run)
        ranks, about = Ranks(self._state.everyone), source.manifest.about
        same_ranks = about.get("ranks") == ranks.size and about.get("mesh", {}) == self._state.model_dims
        private = source.private(ranks.rank) if same_ranks else {}
        if "random" in private:
            run_state.restore_random(private["random"])
        for name, values in private.get("buffers", {}).items():
            if name in view.buffers:
                view.buffers[name].copy_(values)
        window = run.get("window", {})
        has_gradients = bool(about.get("has_gradients"))
        if not (window.get("seen") or has_gradients):
            return
        if not (gradients and run_state.window_fits(self._state, run)):
            run_state.restart_window(self._state, run)
            return
        if has_gradients:
            same, touched = restore.load_window(view, source, rows, ranks, private)
            view.resume_window(touched, private["window"]["deferred"] if same else self._state.window.steps > 1)
        run_state.restore_window(self._state, run, private.get("window"), same_ranks)

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
        first = self._state.axes.same_slice.ranks[0]
        with GatheredParameters(list(self._state.module.parameters()), modifier_rank=first):
            load(src=state, dst=self._state.module)
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
