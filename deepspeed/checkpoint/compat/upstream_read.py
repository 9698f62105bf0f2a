"""Reader of checkpoints in upstream DeepSpeed's layout, with a restricted unpickler."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.format.manifest import (
    BUFFER,
    FROZEN,
    LEFT_OUT,
    TRAINED,
    VALUE,
    ManifestEntry,
    StateRule,
    entry_name,
    state_field,
)
from deepspeed.checkpoint.format.safetensors_file import NAMES
from deepspeed.checkpoint.load.reader import Chunk, TensorSource
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.errors import CheckpointCorruptError, CheckpointError, CheckpointMissingError
from deepspeed.foundation.log import warn_once


class Inert:
    """Replacement for a pickled upstream object, with the object's attributes and without methods."""


class InertNumber(int):
    """Replacement for a pickled upstream enumeration, with its integer value."""


# Replacements for classes in upstream's checkpoints, by the qualified names in the pickles.
_KNOWN: dict[str, type] = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Inert,
    "deepspeed.runtime.fp16.loss_scaler.LossScalerBase": Inert,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Inert,
    "deepspeed.runtime.zero.config.ZeroStageEnum": InertNumber,
    "deepspeed.utils.tensor_fragment.fragment_address": Inert,
}


def load_pt(path: Path) -> Any:
    """Load a file of `torch.save` on the CPU, with memory-mapped tensors and a restricted unpickler.

    Raises:
        CheckpointError: the file names a class that is not allowed; no code of the file was executed.
        CheckpointCorruptError: the file does not exist or cannot be read.
    """
    admitted: list[Any] = [(constructor, name) for name, constructor in _KNOWN.items()]
    try:
        with torch.serialization.safe_globals(admitted):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} has other objects than tensors, plain values and {len(_KNOWN)} known classes, and is refused: "
            f"opening it could run code ({str(error).splitlines()[0][:300]})"
        ) from error
    except (RuntimeError, EOFError, OSError, KeyError, ValueError) as error:
        raise CheckpointCorruptError(f"{path} cannot be read: {error}") from error


# Keys of upstream itself in a model file; all other keys are the user's.
_OWN_KEYS = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler "
    "data_sampler random_ltd sparse_tensor_module_names csr_tensor_module_names skipped_steps global_steps "
    "global_samples dp_world_size mp_world_size checkpoint_parallel_dimensions ds_config ds_version "
    "universal_checkpoint_info num_experts".split()
)


_EXPERT_FILE = re.compile(r"(?:layer_(\d+)_)?expert_(\d+)_mp_rank_00_model_states\.pt")
_EXPERTS = ".deepspeed_experts."  # in the names of their parameters


def open_foreign(path: Path, trained: Iterable[str] = (), ranks: Ranks | None = None) -> TensorSource:
    """Open a checkpoint in upstream DeepSpeed's layout as a source of memory-mapped tensors.

    Args:
        path: folder of one tag, from ZeRO stages 0 to 3 or in the universal format.
        trained: names of the trained parameters in the order of the engine's optimizer, because stage-0 files contain
            only their numbers; empty: the optimizer state of stage 0 is not read.
        ranks: ranks that read together; None: only this process.

    Raises:
        CheckpointMissingError: a file is missing.
        CheckpointCorruptError: a file cannot be read, or files of some ranks or experts are missing.
        CheckpointError: the checkpoint is of several model-parallel ranks, does not fit `trained` or has unsafe types.
    """
    return _Reading(path, list(trained), ranks).source()


class _Reading:
    """Parser of one checkpoint in upstream's layout; collects manifest rows and chunks of values."""

    def __init__(self, path: Path, trained: list[str], ranks: Ranks | None = None) -> None:
        self.path, self.trained, self.ranks = path, trained, ranks
        self.rows: dict[str, ManifestEntry] = {}
        self.chunks: dict[str, list[Chunk]] = {}
        self.states: list[StateRule] = []
        self.optimizer: dict[str, Any] | None = None
        self.experts: dict[str, torch.Tensor] = {}  # of files of their own, by name

    def source(self) -> TensorSource:
        """Parse all files and return the source of their tensors."""
        if list(self.path.glob("*mp_rank_01*")):
            raise CheckpointError(f"{self.path} is of several model-parallel ranks; convert it to the universal form")
        models = [load_pt(file) for file in self._model_files()]
        model = models[0]
        self._experts(model.get("num_experts"))
        if (self.path / "zero").is_dir():
            self._universal(model)
        elif model.get("param_shapes") is None:
            self._unsharded(model)
        else:
            self._sharded(models)
        self._rest(models)
        run = {key: model[key] for key in ("global_steps", "skipped_steps", "global_samples") if key in model}
        engine = {"counters": run, "scheduler": model.get("lr_scheduler"), "optimizer": self.optimizer}
        client = {key: value for key, value in model.items() if key not in _OWN_KEYS}
        about = {"aliases": dict(model.get("shared_params") or {}), "stage": self._stage}
        about["package"] = model.get("ds_version")
        state = {"engine": engine, "client_state": client}
        return TensorSource(self.path, list(self.rows.values()), self.chunks, self.states, state, about, self.ranks)

    def _model_files(self) -> list[Path]:
        files = self._numbered(self.path, "zero_pp_rank_*_mp_rank_00_model_states.pt")
        files = files or list(self.path.glob("mp_rank_00_model_states.pt"))
        if not files:
            raise CheckpointMissingError(f"{self.path} has no *_model_states.pt")
        return files

    # -- stage 0 --------------------------------------------------------------------------------------------------

    def _unsharded(self, model: dict[str, Any]) -> None:
        self._stage = 0
        saved = model.get("optimizer")
        if not saved or not self.trained or self.experts:
            return
        inner = saved.get("optimizer_state_dict", saved)
        groups = inner["param_groups"]
        numbers = [number for group in groups for number in group["params"]]
        if len(numbers) != len(self.trained):
            raise CheckpointError(
                f"{self.path} has {len(numbers)} parameters in its optimizer, the engine has {len(self.trained)}"
            )
        masters = self._masters(saved, [model["module"][name].shape for name in self.trained], groups)
        of_group = {number: index for index, group in enumerate(groups) for number in group["params"]}
        for order, (name, number) in enumerate(zip(self.trained, numbers, strict=True)):
            values = masters[order] if masters else model["module"][name]
            state = inner["state"].get(number, {})
            self._add(name, values.shape, [(0, values.reshape(-1))], (order, of_group[number]))
            self._add_state(name, [(0, values.numel(), state)])
        scaler = {"scale": saved["cur_scale"]} if "cur_scale" in saved else None
        self._take_groups(groups, scaler)

    def _masters(self, saved: dict[str, Any], shapes: list[torch.Size], groups: list[Any]) -> list[torch.Tensor]:
        """Return the master weights of a stage-0 file in the order of the optimizer; empty for fp32 training."""
        if "fp32_groups" in saved:
            return [tensor for group in saved["fp32_groups"] for tensor in group]
        masters, shape_index = [], 0
        for group, flat in zip(groups, saved.get("fp32_groups_flat", ()), strict=False):
            group_shapes, shape_index = (
                shapes[shape_index : shape_index + len(group["params"])],
                shape_index + len(group["params"]),
            )
            offset = 0
            for shape in group_shapes:
                masters.append(flat[offset : offset + shape.numel()].view(shape))
                offset += shape.numel()
        return masters

    # -- stages 1 to 3 --------------------------------------------------------------------------------------------

    def _sharded(self, models: list[dict[str, Any]]) -> None:
        ranks = [load_pt(file)["optimizer_state_dict"] for file in self._optimizer_files()]
        first, shapes = ranks[0], models[0]["param_shapes"]
        self._stage = int(first.get("zero_stage", 1))
        count = first["partition_count"]
        if (count if isinstance(count, int) else max(count)) != len(ranks):
            raise CheckpointCorruptError(f"{self.path} has the optimizer files of {len(ranks)} of {count} ranks")
        order = 0
        for group, named in enumerate(shapes):
            if self.experts and any(_EXPERTS in name for name in named):
                order += len(named)  # each rank has other experts there, by names of its own: values are in their files
                continue
            cut = self._by_parameter if self._stage == 3 else self._by_group
            for name, chunks in cut(ranks, group, {n: torch.Size(s) for n, s in named.items()}):
                self._add(
                    name, torch.Size(named[name]), [(offset, values) for offset, values, _ in chunks], (order, group)
                )
                self._add_state(name, [(offset, values.numel(), state) for offset, values, state in chunks])
                order += 1
        inner = first["optimizer_state_dict" if self._stage == 3 else "base_optimizer_state"]
        self._take_groups(inner["param_groups"], self._scaler(first.get("loss_scaler")))

    def _optimizer_files(self) -> list[Path]:
        for pattern in ("bf16_zero_pp_rank_*_mp_rank_00_optim_states.pt", "zero_pp_rank_*_mp_rank_00_optim_states.pt"):
            files = self._numbered(self.path, pattern)
            if files:
                return files
        raise CheckpointMissingError(f"{self.path} has no *_optim_states.pt")

    def _by_group(
        self, ranks: list[dict[str, Any]], group: int, shapes: dict[str, torch.Size]
    ) -> Iterator[tuple[str, list[tuple[int, torch.Tensor, dict[str, Any]]]]]:
        """Yield (name, chunks) for each parameter of an optimizer group, at stages 1 and 2.

        There, the concatenated parameters of a group are divided equally among ranks. A chunk is (first element of the
        parameter, values, optimizer state).
        """
        parts = [rank["single_partition_of_fp32_groups"][group] for rank in ranks]
        states = [rank["base_optimizer_state"]["state"].get(group, {}) for rank in ranks]
        offset = 0
        for name, shape in shapes.items():
            chunks, chunk_offset = [], 0
            for part, state in zip(parts, states, strict=True):
                low, high = max(offset, chunk_offset), min(offset + shape.numel(), chunk_offset + part.numel())
                if low < high:
                    cut = {
                        k: v[low - chunk_offset : high - chunk_offset] if self._cut(v, part) else v
                        for k, v in state.items()
                    }
                    chunks.append((low - offset, part[low - chunk_offset : high - chunk_offset], cut))
                chunk_offset += part.numel()
            yield name, chunks
            offset += shape.numel()

    def _by_parameter(
        self, ranks: list[dict[str, Any]], group: int, shapes: dict[str, torch.Size]
    ) -> Iterator[tuple[str, list[tuple[int, torch.Tensor, dict[str, Any]]]]]:
        """Yield (name, chunks) as `_by_group`, at stage 3, where each parameter is padded and divided equally."""
        parts = [self._joined(rank, group) for rank in ranks]
        offset = 0
        for name, shape in shapes.items():
            step, chunks = -(-shape.numel() // len(ranks)), []
            for rank, (part, state) in enumerate(parts):
                start = rank * step
                size = min(step, shape.numel() - start)
                if size > 0:
                    cut = {k: v[offset : offset + size] if self._cut(v, part) else v for k, v in state.items()}
                    chunks.append((start, part[offset : offset + size], cut))
            yield name, chunks
            offset += step

    # -- universal ------------------------------------------------------------------------------------------------

    def _universal(self, model: dict[str, Any]) -> None:
        self._stage = 0
        shapes = {name: torch.Size(s) for group in model.get("param_shapes") or [] for name, s in group.items()}
        groups = {name: i for i, group in enumerate(model.get("param_shapes") or []) for name in group}
        for order, name in enumerate(shapes):
            folder = self.path / "zero" / name
            if not folder.is_dir():
                raise CheckpointMissingError(f"{folder} is missing")
            tensors = {
                file.stem: self._bare(load_pt(file)) for file in sorted(folder.glob("*.pt")) if file.stem != "step"
            }
            step = folder / "step.pt"
            state = {key: value for key, value in tensors.items() if key != "fp32"}
            if step.exists():
                state["step"] = torch.as_tensor(self._bare(load_pt(step))).float()
            values = tensors["fp32"].reshape(-1)
            self._add(name, shapes[name], [(0, values)], (order, groups[name]))
            self._add_state(name, [(0, values.numel(), state)])
        saved = self.path / "zero" / "optimizer_state.pt"
        if saved.exists():
            self._take_groups(load_pt(saved)["param_groups"], None)

    # -- rows -----------------------------------------------------------------------------------------------------

    def _add(self, name: str, shape: torch.Size, chunks: list[Chunk], place: tuple[int, int]) -> None:
        dtype = chunks[0][1].dtype if chunks else torch.float32
        self.rows[name] = ManifestEntry(name, tuple(shape), dtype, TRAINED, None, *place)
        self.chunks[entry_name(VALUE, name)] = chunks

    def _add_state(self, name: str, chunks: list[tuple[int, int, dict[str, Any]]]) -> None:
        """Add a parameter's optimizer state from chunks (first element, number of elements, state).

        State tensors with as many elements as their chunk are sharded like the parameter; other tensors are scalars.
        """
        rule = StateRule({}, {}, {})
        for start, numel, state in chunks:
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() and value.numel() == numel:
                    rule.sliced[key] = value.dtype
                    self.chunks.setdefault(entry_name(state_field(key), name), []).append((start, value.reshape(-1)))
                elif isinstance(value, torch.Tensor):
                    rule.values[key] = {"number": value.item(), "dtype": NAMES[value.dtype]}
                else:
                    rule.values[key] = value
        if rule.sliced or rule.values:
            if rule not in self.states:
                self.states.append(rule)
            row = self.rows[name]
            self.rows[name] = ManifestEntry(
                row.name, row.shape, row.dtype, row.kind, self.states.index(rule), row.order, row.group
            )

    def _take_groups(self, groups: list[dict[str, Any]], scaler: dict[str, Any] | None) -> None:
        settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        self.optimizer = {"groups": settings, "scaler": scaler}

    def _rest(self, models: list[dict[str, Any]]) -> None:
        """Add frozen parameters, which may be sharded over the model files, and the tensors that have no row yet."""
        model = models[0]
        frozen = model.get("frozen_param_shapes") or {}
        for name, shape in frozen.items():
            offset, chunks = 0, []
            for model_state in models:
                fragment = (model_state.get("frozen_param_fragments") or {}).get(name)
                if fragment is not None:
                    values = fragment.reshape(-1)[: torch.Size(shape).numel() - offset]
                    chunks.append((offset, values))
                    offset += values.numel()
            kind = FROZEN if chunks else LEFT_OUT
            self.rows[name] = ManifestEntry(name, tuple(shape), chunks[0][1].dtype if chunks else torch.float32, kind)
            self.chunks[entry_name(VALUE, name)] = chunks
        aliases, buffers = model.get("shared_params") or {}, set(model.get("buffer_names") or ())
        module = {k: v for k, v in (model.get("module") or {}).items() if not (self.experts and _EXPERTS in k)}
        # Files of stage 0, and those of experts, do not say which parameters are trained.
        trained = self.experts.keys() | set(self.trained)
        others = TRAINED if model.get("param_shapes") is None and not self.trained else FROZEN
        for name, value in [*module.items(), *self.experts.items()]:
            if name not in self.rows and name not in aliases and isinstance(value, torch.Tensor):
                kind = BUFFER if name in buffers else TRAINED if name in trained else others
                self.rows[name] = ManifestEntry(name, tuple(value.shape), value.dtype, kind)
                self.chunks[entry_name(VALUE, name)] = [(0, value.reshape(-1))]

    def _experts(self, counts: int | list[int] | None) -> None:
        """Read the files of single experts: one for each layer and expert or, in the old format, for each expert.

        Args:
            counts: number of experts of each layer, to raise CheckpointCorruptError for missing files; None: no check.
        """
        files = {
            (int(match.group(1) or 0), int(match.group(2))): file
            for file in self.path.glob("*expert_*_mp_rank_00_model_states.pt")
            if (match := _EXPERT_FILE.fullmatch(file.name))
        }
        if not files:
            return
        by_layer = any(file.name.startswith("layer_") for file in files.values())
        listed = [counts] if isinstance(counts, int) else list(counts or ())
        wanted = {(layer, e) for layer, count in enumerate(listed if by_layer else listed[:1]) for e in range(count)}
        if absent := sorted(wanted - set(files)):
            layer, expert = absent[0]
            raise CheckpointCorruptError(
                f"{self.path} has no file of expert {expert} of layer {layer} (of {len(absent)} that are missing); its "
                f"layers have {listed} experts"
            )
        for _, file in sorted(files.items()):
            self.experts |= load_pt(file)
        warn_once(
            f"{self.path} has a file for each expert: their weights are read, and not the optimizer's state of them, "
            f"which is stored by rank"
        )

    # -- what the files hold --------------------------------------------------------------------------------------

    @staticmethod
    def _numbered(path: Path, pattern: str) -> list[Path]:
        """Return the files that match a pattern, in the order of data-parallel ranks.

        Raises:
            CheckpointCorruptError: the file of a rank is missing.
        """
        files = {int(re.search(r"pp_rank_(\d+)", file.name).group(1)): file for file in path.glob(pattern)}  # type: ignore[union-attr]
        if sorted(files) != list(range(len(files))):
            raise CheckpointCorruptError(f"{path}: {pattern} has ranks {sorted(files)}; some are missing")
        return [files[rank] for rank in sorted(files)]

    @staticmethod
    def _cut(value: Any, part: torch.Tensor) -> bool:
        """Whether a state tensor is sharded like the values `part`; the state tensor may be longer, by padding."""
        return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() >= part.numel()

    @staticmethod
    def _bare(loaded: Any) -> Any:
        return loaded["param"] if isinstance(loaded, dict) else loaded

    def _joined(self, rank: dict[str, Any], group: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return a rank's values and state of a group at stage 3; CheckpointError if several groups have sub-groups."""
        flat, states = rank["fp32_flat_groups"], rank["optimizer_state_dict"]["state"]
        groups = len(rank["optimizer_state_dict"]["param_groups"])
        if len(flat) == groups:
            return flat[group], states.get(group, {})
        if groups != 1:
            raise CheckpointError(
                f"a stage 3 file has {groups} optimizer groups in {len(flat)} sub-groups: not known here"
            )
        state = dict(states.get(0, {}))
        for key, value in state.items():
            if self._cut(value, flat[0]):
                state[key] = torch.cat([states[number][key] for number in range(len(flat))])
        return torch.cat(flat), state

    @staticmethod
    def _scaler(saved: Any) -> dict[str, Any] | None:
        """Return the state of this package's loss scaler from upstream's loss scaler; None without a scale."""
        values = vars(saved) if hasattr(saved, "__dict__") else {}
        if "cur_scale" not in values:
            return None
        scaler = {"scale": float(values["cur_scale"])}
        if "cur_iter" in values:
            scaler["clean_steps"] = values["cur_iter"] - values.get("last_overflow_iter", -1) - 1
            scaler["hysteresis_left"] = values.get("cur_hysteresis", 1)
        return scaler
