"""Reading and writing of whole weights: state dicts, one 16-bit file, Hugging Face folders."""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from deepspeed.checkpoint.format import filesystem
from deepspeed.checkpoint.format.manifest import ManifestEntry
from deepspeed.checkpoint.huggingface import FolderSource, once
from deepspeed.checkpoint.load import load
from deepspeed.checkpoint.load.reader import Source, from_state_dict
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.checkpoint.save.save_plan import join_slices
from deepspeed.engine.engine_state import EngineState
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.foundation.log import log_rank0, logger, warn_once
from deepspeed.zero.api.gathered_parameters import GatheredParameters
from deepspeed.zero.api.state_view import StateView
from deepspeed.zero.parameters.parameter import StandIn
from deepspeed.zero.parameters.shard_group import ShardGroup, meet_before_change

_METHOD = "save_pretrained"
_windows: weakref.WeakKeyDictionary[nn.Module, SaveWindow] = weakref.WeakKeyDictionary()


class SaveWindow:
    """Weak references to the last gathered weights, which `save_pretrained` of submodules saves until one changes.

    A client gathers the whole weights and then calls `save_pretrained` of a submodule, on one rank or on all. If the
    gathered weights still exist and none has changed, rank 0 writes these weights, and the others write nothing. No
    collective runs, and no tensor is kept alive for this purpose.

    Args:
        module: the model.
        state: the whole weights by name, on rank 0; None on other ranks.
        groups: sharded groups of the model.
    """

    def __init__(
        self, module: nn.Module, state: Mapping[str, torch.Tensor] | None, groups: Iterable[ShardGroup]
    ) -> None:
        self._changes = [(weakref.ref(group), group.changes) for group in groups]
        self._copies: dict[int, weakref.ref[torch.Tensor]] | None = None
        if state is not None:
            members = [member for group in groups for member in group.members]
            names = {id(param): name for name, param in module.named_parameters()}
            copies = [(member.uid, state.get(names.get(id(member.param), ""))) for member in members]
            self._copies = {uid: weakref.ref(copy) for uid, copy in copies if copy is not None}
        for part in module.modules() if self._changes else ():
            method = None if _METHOD in vars(part) else getattr(type(part), _METHOD, None)
            if callable(method) and "is_main_process" in inspect.signature(method).parameters:
                object.__setattr__(part, _METHOD, MethodType(save_pretrained, part))
            _windows[part] = self

    @property
    def open(self) -> bool:
        """Return whether no weight has changed since the gather."""
        groups = [(group(), changes) for group, changes in self._changes]
        return all(group is not None and group.changes == changes for group, changes in groups)

    @property
    def writes(self) -> bool:
        return self._copies is not None

    def state_of(self, part: nn.Module) -> dict[str, Any] | None:
        """Return a submodule's state dict with whole weights; None if one of them was freed."""
        state: dict[str, Any] = {}
        for name, value in part.state_dict().items():
            if isinstance(value, StandIn):
                value = (self._copies or {}).get(value._ds_member.uid, lambda: None)()
                if value is None:
                    return None
            state[name] = value
        return state


def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `save_pretrained` of a submodule's class with the last gathered weights, if they are still valid.

    Ranks other than 0 then write nothing and return None. With a `state_dict` argument, the call is unchanged.
    """
    save, window = getattr(type(self), _METHOD), _windows.get(self)
    names = list(inspect.signature(save).parameters)[1:]  # PEFT's third argument is another one
    place = names.index("state_dict") if "state_dict" in names else len(args)
    by_caller = args[place] if len(args) > place else kwargs.get("state_dict")
    if window is None or by_caller is not None or not window.open:
        return save(self, *args, **kwargs)
    if not window.writes:
        warn_once("save_pretrained writes nothing here: rank 0 has the weights that were gathered, and writes them")
        return None
    state = window.state_of(self)
    if state is None:
        return save(self, *args, **kwargs)
    if len(args) > place:
        return save(self, *args[:place], state, *args[place + 1 :], **kwargs)
    return save(self, *args, **{**kwargs, "state_dict": state})


class WeightsIO:
    """Reading and writing of an engine's whole weights."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._mixed = ""  # error of a load that failed midway and left old and new values; empty: none
        self._mixed_optimizer = False  # whether that load included optimizer state
        self._mixed_guard: Any = None

    def check_custom(self, view: StateView) -> None:
        """Raise ArgumentError for a client's load function, which gets whole tensors, if this rank has slices."""
        if view.cut:
            raise ArgumentError(
                "custom_load_fn gets whole tensors, and this rank holds slices of the model; load without it"
            )

    @contextmanager
    def replacing(self, optimizer: bool = False) -> Iterator[None]:
        """Mark the engine as invalid if replacing tensors fails inside the context, until a load succeeds.

        Checksums are verified while bytes are read into place, so a failure can leave a mix of old and new values. All
        ranks must enter the context together.

        Args:
            optimizer: optimizer state is replaced too.
        """
        meet_before_change(self._state.components.groups)
        try:
            yield
        except BaseException as error:
            self._mixed = f"{type(error).__name__}: {error}"
            self._mixed_optimizer |= optimizer
            if self._mixed_guard is None:
                self._mixed_guard = self._state.module.register_forward_pre_hook(lambda *_: self.check_whole())
            raise
        if self._mixed and optimizer >= self._mixed_optimizer:
            self._mixed_guard.remove()
            self._mixed, self._mixed_optimizer, self._mixed_guard = "", False, None

    def check_whole(self) -> None:
        """Raise UsageError if the last load has failed midway and left a mix of old and new values."""
        if self._mixed:
            raise UsageError(
                f"the last load failed in the middle and left old and new values side by side ({self._mixed}); load "
                f"another checkpoint{', optimizer included,' if self._mixed_optimizer else ''} before going on"
            )

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the weights in the compute dtype to one file for `torch.load`. All ranks must call this.

        Args:
            save_dir: folder of the file.
            save_filename: name of the file; the ending `.safetensors` selects that format.
            exclude_frozen_parameters: omit parameters that do not require a gradient.

        Returns:
            True; at stage 3 without `stage3_gather_16bit_weights_on_model_save` False, and nothing is written.

        Raises:
            UsageError: the last load has failed midway.
            OSError: writing failed on rank 0; other ranks raise CheckpointError.
        """
        if self._state.ds_config.zero.stage == 3 and not self._state.ds_config.zero.gather_16bit_weights_on_model_save:
            logger.warning(
                "save_16bit_model did not save: at stage 3 it gathers the whole model on rank 0, which "
                "zero_optimization.stage3_gather_16bit_weights_on_model_save must allow"
            )
            return False
        self.check_whole()
        state = self._consolidated_16bit_state_dict(exclude_frozen_parameters)
        with Ranks(self._state.everyone).together(f"saving {save_filename}"):
            if state is not None:
                path = Path(save_dir) / save_filename
                path.parent.mkdir(parents=True, exist_ok=True)
                staged = path.with_name(f".{path.name}.saving")  # readers see the old file or the new one
                if path.suffix == ".safetensors":
                    save_file(once(state), staged, {"format": "pt"})
                else:
                    torch.save(OrderedDict(state), staged)
                filesystem.current.rename(staged, path)
        return True

    save_fp16_model = save_16bit_model

    def _consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> OrderedDict[str, torch.Tensor] | None:
        """Return the whole model's state dict on the CPU of rank 0, None on other ranks. All ranks must call this."""
        state_dict: dict[str, torch.Tensor] = {}
        view = self._state.view()
        view.settle()
        if self._state.compression is not None:
            self._state.compression.masks.enforce()
        batches = [[member.param for member in group.members] for group in view.groups] + [list(view.plain.values())]
        names = {id(param): name for name, param in self._state.module.named_parameters()}
        for params in batches:
            # Skip parameters that were removed from the module since, as by `weight_norm`.
            inside = [p for p in params if id(p) in names]
            wanted = [p for p in inside if p.requires_grad or not exclude_frozen_parameters]
            with GatheredParameters(wanted):
                own = [p for p in wanted if self._state.is_first_with(p)]
                state_dict |= {names[id(p)]: p.detach().cpu().clone() for p in own}
        if self._state.axes.dp_sp_group.rank == 0:
            state_dict |= {name: buffer.detach().cpu().clone() for name, buffer in view.buffers.items()}
        aliases = view.aliases
        if self._state.sliced:
            state_dict, aliases = join_slices(view, state_dict, Ranks(self._state.everyone))
        sharded = [group for group in view.groups if group.policy.gathers_before_use and not self._state.sliced]
        if self._state.everyone.rank:
            SaveWindow(self._state.module, None, sharded)
            return None
        state_dict |= {alias: state_dict[name] for alias, name in aliases.items() if name in state_dict}
        order = [name for name in self._state.module.state_dict(keep_vars=True) if name in state_dict]
        state = OrderedDict((name, state_dict[name]) for name in dict.fromkeys([*order, *state_dict]))
        SaveWindow(self._state.module, state, sharded)
        return state

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> OrderedDict[str, torch.Tensor] | None:
        """Call `_consolidated_16bit_state_dict`; raises ArgumentError at other stages than 3."""
        stage = self._state.ds_config.zero.stage
        if stage != 3:
            raise ArgumentError(f"_zero3_consolidated_16bit_state_dict is for stage 3, the engine has {stage}")
        return self._consolidated_16bit_state_dict(exclude_frozen_parameters)

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the module's state dict; sharded parameters are placeholders, and reading one can be a collective.

        Args:
            destination: dict to fill; None: a new one.
            prefix: prefix of every name.
            keep_vars: return the parameters themselves instead of detached tensors.
            exclude_frozen_parameters: omit parameters that do not require a gradient.
        """
        state = self._state.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, param in self._state.module.named_parameters(remove_duplicate=False):
                if not param.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> load.Loaded:
        """Load full weights into the module, sharded or not. All ranks must call this, with the same weights.

        Args:
            checkpoint: a state dict, or a dict that has one under `module`.
            strict: require equal names.
            custom_load_fn: called as `custom_load_fn(src=state_dict, dst=module)` instead of matching names.
            fetch_z3_params: accepted without effect: shards are loaded directly.

        Returns:
            Missing and unexpected names, and numbers of elements; all empty or 0 with `custom_load_fn`.

        Raises:
            CheckpointError: names differ and `strict`, or a shape differs.
            ArgumentError: `custom_load_fn` is passed, but this rank has slices of the model.
        """
        inside = checkpoint.get("module")
        state = inside if isinstance(inside, Mapping) else checkpoint
        self._state.forget_window()
        view = self._state.view()
        if custom_load_fn is not None:
            self.check_custom(view)
            with GatheredParameters(
                list(self._state.module.parameters()), modifier_rank=self._state.axes.dp_sp_group.ranks[0]
            ):
                custom_load_fn(src=state, dst=self._state.module)
            view.settle()
            return load.Loaded()
        source = from_state_dict(state, "the state dict")
        rows, loaded = self._compare(view, source, strict)
        with self.replacing():
            load.load_values(view, source, rows)
        log_rank0(f"loaded {loaded.elements:,} of {loaded.total:,} elements from the state dict")
        return loaded

    def _compare(self, view: StateView, source: Source, strict: bool) -> tuple[dict[str, ManifestEntry], load.Loaded]:
        """Call `load.compare` so that an error on one rank raises on all. All ranks must call this."""
        if not self._state.sliced:
            return load.compare(view, source, strict)
        elsewhere = self._state.names_elsewhere(view)
        with Ranks(self._state.everyone).together(f"comparing {source.path} with the engine"):
            loaded = load.compare(view, source, strict, elsewhere)
        return loaded

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:  # noqa: D102
        """Load a state dict, also into sharded parameters; names may begin with `module.`.

        Args:
            state_dict: whole weights, the same on all ranks, which must all call this.
            strict: require equal names.
            assign: only False is supported: values are copied into the existing parameters.

        Returns:
            Missing and unexpected names, as in torch.

        Raises:
            ArgumentError: `assign` is true.
            CheckpointError: names differ and `strict`, or a shape differs.
        """
        if assign:
            raise ArgumentError("load_state_dict(assign=True) would replace parameters that the engine holds")
        state = {name.removeprefix("module."): value for name, value in state_dict.items()}
        loaded = self.load_module_state_dict({"module": state}, strict)
        return torch.nn.modules.module._IncompatibleKeys(loaded.missing, loaded.unexpected)

    def load_pretrained(self, path: str | Path, strict: bool = True) -> int:
        """Load Hugging Face safetensors into the engine. Every rank reads only its part; all ranks must call this.

        Args:
            path: a folder written by `save_pretrained`, or a safetensors file.
            strict: require equal names in model and file.

        Returns:
            The number of loaded elements.

        Raises:
            CheckpointError: the files are missing or invalid, names differ and `strict`, or a shape differs.
        """
        self._state.forget_window()
        view, source = self._state.view(), FolderSource(Path(path), Ranks(self._state.everyone))
        rows, loaded = self._compare(view, source, strict)
        with self.replacing():
            load.load_values(view, source, rows)
        log_rank0(f"loaded {loaded.elements:,} of {loaded.total:,} elements from {path}")
        return loaded.elements
