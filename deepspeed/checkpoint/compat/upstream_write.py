"""Writer of a checkpoint in upstream DeepSpeed's layout beside the native files, and of files for upstream's tools.

The two layouts are sharded differently, so each rank reads its part of upstream's layout from the native files, after
these were written.
"""

from __future__ import annotations

import copy
import io
import pickle
import zlib
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from deepspeed.checkpoint.format import filesystem
from deepspeed.checkpoint.format.json_codec import Decoder
from deepspeed.checkpoint.format.manifest import BUFFER, LEFT_OUT, VALUE, ManifestEntry, state_field
from deepspeed.checkpoint.format.safetensors_file import Seal
from deepspeed.checkpoint.load.reader import ReadRequest, Source
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.foundation.log import log_once
from deepspeed.version import __version__
from deepspeed.zero.layout.regions import Region, RegionRange

_SCRIPT = '''#!/usr/bin/env python
"""Writes the fp32 weights of the checkpoints beside this file: python zero_to_fp32.py . OUTPUT_DIR."""

from deepspeed.utils.zero_to_fp32 import main

if __name__ == "__main__":
    main()
'''
SCRIPTS = {"zero_to_fp32.py": _SCRIPT.encode()}


def upstream_names(client_state: dict[str, Any], about: dict[str, Any], counters: dict[str, int]) -> dict[str, bytes]:
    """Return small files under upstream's names, with client state and counters but without weights.

    Converters of other programs read these values from the files, and the weights with `zero_to_fp32`.
    `torch.load(weights_only=True)` can open the files.

    Args:
        client_state: the user's state; entries that such a file cannot contain are left out and logged.
        about: entries `stage`, `ranks` and `precision` of the manifest.
        counters: `skipped_steps`, `global_steps`, `global_samples`.

    Returns:
        Contents of the files, by name.
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
    remaining = {key: value for key, value in client_state.items() if key not in shared}
    model = {**shared, **plain(remaining)}
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
    """Return the entries of `state` that `torch.load(weights_only=True)` accepts; the others are logged."""
    plain_values = {}
    for key, value in state.items():
        try:
            torch.load(io.BytesIO(_saved({key: value})), weights_only=True)
            plain_values[key] = value
        except Exception as error:  # whatever pickling or the restricted unpickler has against it
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            log_once(f"client_state[{key!r}] is not in the files under upstream's names: {reason[:120]}")
    return plain_values


_PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class _Sink:
    """File object for `torch.save` that writes through `filesystem.current` and computes length and CRC-32."""

    def __init__(self, fd: int) -> None:
        self._fd, self.nbytes, self.crc32 = fd, 0, 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        filesystem.current.write(self._fd, view, self.nbytes)
        self.nbytes, self.crc32 = self.nbytes + len(view), zlib.crc32(view, self.crc32)
        return len(view)

    def flush(self) -> None:
        """Return without effect; `write` does not buffer data."""


class _LossScaler:
    """Placeholder for upstream's static loss scaler, which upstream's engine unpickles."""

    def __init__(self, scale: float) -> None:
        self.cur_scale, self.dynamic = scale, False


_InPython: Any = pickle._Pickler  # the one in C writes names as it finds them


class _Pickler(_InPython):
    """Pickler that writes `_LossScaler` under the name of upstream's class."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if obj is not _LossScaler:
            super().save_global(obj, name)
            return
        self.write(pickle.GLOBAL + b"deepspeed.runtime.fp16.loss_scaler\nLossScaler\n")
        self.memoize(obj)


_PICKLE = SimpleNamespace(__name__=__name__, Pickler=_Pickler)  # what `torch.save` asks of a module


class UpstreamWriter:
    """Writer of one checkpoint's files in upstream's layout.

    Args:
        source: native checkpoint; its manifest need not be written yet.
        ranks: ranks that save together.
        settings: settings of each optimizer group, such as the learning rate.
        scale: loss scale; a dynamic scale is written as a static one.
        shared: entries of every model file: counters, schedule, configuration, client state.
    """

    def __init__(
        self, source: Source, ranks: Ranks, settings: list[dict[str, Any]], scale: float, shared: dict[str, Any]
    ) -> None:
        self.source, self.ranks, self.settings, self.scale, self.shared = source, ranks, settings, scale, shared
        self.stage = source.manifest.about["stage"]
        self.low = _PRECISIONS[source.manifest.about["precision"]]
        rows = source.manifest.rows
        trained = sorted((row for row in rows if row.group >= 0), key=lambda row: row.order)
        self.groups = [[row for row in trained if row.group == number] for number in range(len(settings))]
        self.frozen = [row for row in rows if row.group < 0 and row.kind not in (BUFFER, LEFT_OUT)]
        self.buffers = [row for row in rows if row.kind == BUFFER]

    def write(self) -> dict[str, Seal]:
        """Write this rank's files into the folder of `source`; return the seals of all ranks' files. Collective."""
        rank = self.ranks.rank
        seals: dict[str, Seal] = {}
        model, optimizer = self._model(), self._optimizer() if self.stage else None
        prefix = "bf16_" if self.low == torch.bfloat16 else ""
        with self.ranks.together("writing upstream's files"):
            if self.stage == 3 or rank == 0:
                name = f"zero_pp_rank_{rank}_mp_rank_00" if self.stage == 3 else "mp_rank_00"
                seals[f"{name}_model_states.pt"] = self._save(model, self.source.path / f"{name}_model_states.pt")
            if optimizer is not None:
                name = f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
                seals[name] = self._save(optimizer, self.source.path / name)
        return {name: seal for rank_seals in self.ranks.gather(seals) for name, seal in rank_seals.items()}

    def _read(self, wanted: list[tuple[str, ManifestEntry, int, int, torch.Tensor]]) -> None:
        self.source.read(
            [
                ReadRequest(field, row, RegionRange(Region(row.shape), start, stop), into)
                for field, row, start, stop, into in wanted
            ]
        )

    def _whole(self, rows: list[ManifestEntry], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Return unsharded values by name; empty on other ranks than 0 below stage 3. Collective.

        Args:
            rows: parameters or buffers.
            dtype: dtype of the result; None: the stored dtype.
        """
        if self.ranks.rank and self.stage < 3:
            rows = []
        tensors = {row.name: torch.empty(row.shape, dtype=dtype or row.dtype) for row in rows}
        self._read([(VALUE, row, 0, row.numel, tensors[row.name].reshape(-1)) for row in rows])
        return tensors

    def _model(self) -> dict[str, Any]:
        trained = [row for group in self.groups for row in group]
        aliases = self.source.manifest.aliases
        if self.stage == 3:
            values = {row.name: torch.empty(0, dtype=self.low) for row in (*trained, *self.frozen)}
            fragments = self._fragments()
        else:
            values = self._whole(trained, self.low) | self._whole(self.frozen)
            fragments = {row.name: values.get(row.name) for row in self.frozen}
        values |= self._whole(self.buffers)
        values |= {alias: values[name] for alias, name in aliases.items() if name in values}
        sharded = self.stage > 0
        return {
            "module": OrderedDict(values),
            "buffer_names": [row.name for row in self.buffers],
            "optimizer": None if sharded else self._plain_optimizer(),
            "param_shapes": [self._shapes(group) for group in self.groups] if sharded else None,
            "frozen_param_shapes": self._shapes(self.frozen) if sharded and self.frozen else None,
            "frozen_param_fragments": OrderedDict(fragments) if sharded and self.frozen else None,
            "shared_params": dict(aliases) if sharded else None,
            "dp_world_size": self.ranks.size,
            "mp_world_size": 1,
            "ds_version": __version__,
            **self.shared,
        }

    def _fragments(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of every frozen parameter by name, at stage 3, padded at the end. Collective."""
        fragments, wanted = {}, []
        for row in self.frozen:
            step = -(-row.numel // self.ranks.size)
            fragments[row.name] = torch.zeros(step, dtype=row.dtype)
            wanted += self._run(VALUE, row, self.ranks.rank * step, step, fragments[row.name])
        self._read(wanted)
        return fragments

    # -- optimizer ------------------------------------------------------------------------------------------------

    def _keys(self, group: list[ManifestEntry]) -> tuple[dict[str, torch.dtype], dict[str, Any]]:
        """Return dtypes of sharded tensors, and plain values, by key, of the first optimizer state in a group."""
        decoder = Decoder(lambda _: torch.empty(0))
        for row in group:
            rule = self.source.manifest.state_of(row)
            if rule is not None:
                values = {}
                for key, value in rule.values.items():
                    number = isinstance(value, dict) and "number" in value
                    values[key] = torch.tensor(float(value["number"])) if number else decoder.decode(value)
                return dict(rule.sliced), values
        return {}, {}

    def _plain_optimizer(self) -> dict[str, Any] | None:
        """Return rank 0's optimizer state dict at stage 0, with master weights for 16-bit models. Collective."""
        state: dict[int, dict[str, Any]] = {}
        masters, numbers, number = [], [], 0
        for group in self.groups:
            keys, values = self._keys(group)
            masters.append(list(self._whole(group).values()))
            tensors = {key: self._field(group, key, dtype) for key, dtype in keys.items()}
            numbers.append(list(range(number, number + len(group))))
            for row in group:
                # Each its own: a step that is shared would be counted once for every parameter.
                own = copy.deepcopy(values)
                state[number] = {**own, **{key: whole.get(row.name) for key, whole in tensors.items()}}
                number += 1
        groups = [
            {**group_settings, "params": group_numbers}
            for group_settings, group_numbers in zip(self.settings, numbers, strict=True)
        ]
        inner = {"state": state, "param_groups": groups}
        if self.low == torch.float32:
            return inner
        scale = {"dynamic_loss_scale": False, "cur_scale": self.scale, "cur_iter": self.shared.get("global_steps", 0)}
        return {**scale, "optimizer_state_dict": inner, "fp32_groups": masters}

    def _field(self, group: list[ManifestEntry], key: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        rows = group if self.ranks.rank == 0 else []
        tensors = {row.name: torch.empty(row.shape, dtype=dtype) for row in rows}
        self._read([(state_field(key), row, 0, row.numel, tensors[row.name].reshape(-1)) for row in rows])
        return tensors

    def _optimizer(self) -> dict[str, Any]:
        cut = self._by_parameter if self.stage == 3 else self._by_group
        masters, states = [], {}
        for number, group in enumerate(self.groups):
            keys, values = self._keys(group)
            masters.append(cut(group, VALUE, torch.float32))
            states[number] = {**values, **{key: cut(group, state_field(key), dtype) for key, dtype in keys.items()}}
        groups = [{**group_settings, "params": [number]} for number, group_settings in enumerate(self.settings)]
        inner = {"state": states, "param_groups": groups}
        state: dict[str, Any] = {"zero_stage": self.stage, "ds_version": __version__, "overflow": False}
        state |= {"loss_scaler": _LossScaler(self.scale), "dynamic_loss_scale": False}
        if self.stage == 3:
            state |= {"partition_count": self.ranks.size, "optimizer_state_dict": inner, "fp32_flat_groups": masters}
        else:
            state |= {"partition_count": [self.ranks.size] * len(self.groups), "base_optimizer_state": inner}
            state |= {"single_partition_of_fp32_groups": masters, "clip_grad": 0.0}
            state |= {"group_paddings": [self._padding(group) for group in self.groups]}
        return {"optimizer_state_dict": state, "ds_version": __version__}

    def _step(self, group: list[ManifestEntry]) -> int:
        """Return the number of a group's elements per rank at stages 1 and 2.

        The total is padded to a multiple of twice the number of ranks.
        """
        unit = 2 * self.ranks.size
        return -(-sum(row.numel for row in group) // unit) * unit // self.ranks.size

    def _padding(self, group: list[ManifestEntry]) -> int:
        last = self.ranks.rank == self.ranks.size - 1
        return self._step(group) * self.ranks.size - sum(row.numel for row in group) if last else 0

    def _by_group(self, group: list[ManifestEntry], field: str, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's part of a group's concatenated parameters at stages 1 and 2. Collective.

        Master weights have no padding at the end; optimizer states have.
        """
        step, total = self._step(group), sum(row.numel for row in group)
        low, high = min(self.ranks.rank * step, total), min((self.ranks.rank + 1) * step, total)
        flat, wanted, offset = torch.zeros(high - low if field == VALUE else step, dtype=dtype), [], 0
        for row in group:
            start, stop = max(low, offset), min(high, offset + row.numel)
            if start < stop:
                wanted.append((field, row, start - offset, stop - offset, flat[start - low : stop - low]))
            offset += row.numel
        self._read(wanted)
        return flat

    def _by_parameter(self, group: list[ManifestEntry], field: str, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's parts of a group's parameters at stage 3, padded and concatenated. Collective."""
        steps = [-(-row.numel // self.ranks.size) for row in group]
        flat, wanted, offset = torch.zeros(sum(steps), dtype=dtype), [], 0
        for row, step in zip(group, steps, strict=True):
            wanted += self._run(field, row, self.ranks.rank * step, step, flat[offset : offset + step])
            offset += step
        self._read(wanted)
        return flat

    @staticmethod
    def _save(value: Any, path: Path) -> Seal:
        with filesystem.created(path) as fd:
            sink = _Sink(fd)
            torch.save(value, sink, pickle_module=_PICKLE)  # type: ignore[arg-type]
        return Seal(sink.nbytes, sink.crc32)

    @staticmethod
    def _run(
        field: str, row: ManifestEntry, start: int, numel: int, into: torch.Tensor
    ) -> list[tuple[str, ManifestEntry, int, int, torch.Tensor]]:
        """Return arguments of `_read` for elements [start, start + numel) of a parameter, without padding."""
        stop = min(start + numel, row.numel)
        return [(field, row, start, stop, into[: stop - start])] if start < stop else []

    @staticmethod
    def _shapes(rows: list[ManifestEntry]) -> OrderedDict[str, torch.Size]:
        return OrderedDict((row.name, torch.Size(row.shape)) for row in rows)
